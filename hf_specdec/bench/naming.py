"""What a row's name says: a method with its configuration, or a class of the user's own.

method, value = split_config('prompt_lookup={"num_branches": 4}')
factory = imported("my_module:MyDrafter")
"""

import importlib
import json
from collections.abc import Callable
from typing import Any

from hf_specdec.errors import ConfigError

__all__ = ["imported", "is_import", "split_config"]


def split_config(name: str) -> tuple[str, Any]:
    """The method's name, and the configuration behind `=` as `SpecConfig.parse` takes it; `None` without one."""
    method, equals, text = name.partition("=")
    if not equals:
        return name, None
    try:
        return method, json.loads(text)
    except json.JSONDecodeError:
        return method, text  # a Python literal, or an error that `parse` explains


def is_import(name: str) -> bool:
    """Whether the name is `module:Class`."""
    return ":" in name and "=" not in name and not name.startswith("transformers:")


def imported(name: str) -> Callable[..., Any]:
    """The class or function called `module:name`.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("row", "must be module:Class that can be imported", name, f"{error}.") from error
    return found
