"""Names of rows: a method with its configuration, or a class of the user's own."""

import ast
import importlib
import json
import re
from collections.abc import Callable
from typing import Any

from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import METHODS

KEYS = re.compile(r"([\w+]+):(.*)", re.DOTALL)
COMPANIONS = ("draft_model", "head")  # what a row may have next to what the method has of its own


def is_method(name: str) -> bool:
    """Tell names of methods, with or without a configuration."""
    method_name, _ = split_companion(re.split("[:=]", name, maxsplit=1)[0])
    return any(method_name in (method.name, *method.aliases) for method in METHODS.values())


def split_companion(name: str) -> tuple[str, str | None]:
    """A method's name, and what it is to have next to what it has of its own: `"draft_model"`, `"head"` or nothing."""
    method, _, companion = name.partition("+")
    return (method, companion) if companion in COMPANIONS else (name, None)


def split_config(name: str) -> tuple[str, Any]:
    """The method's name, and its configuration as `SpecConfig.parse` takes it; `None` without one.

    Behind `=` stands a dict or a list, behind `:` its keys, `key=value,key=value`; a word as a value is that text.
    """
    keyed = KEYS.fullmatch(name)
    if keyed is not None:
        return keyed[1], read_keys(keyed[2], name)
    method, equals, text = name.partition("=")
    if not equals:
        return name, None
    try:
        return method, json.loads(text)
    except json.JSONDecodeError:
        return method, text  # a Python literal, or an error that `parse` explains


def read_keys(text: str, name: str) -> dict[str, Any]:
    """The configuration out of `key=value,key=value` in the row called `name`."""
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError(text)
        return {str(keyword.arg): _value(keyword) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        remedy = "For example prompt_lookup:num_branches=4,pool=shared."
        raise ConfigError("row", "must be method:key=value,key=value", name, remedy) from error


def _value(keyword: ast.keyword) -> Any:
    if keyword.arg is None:
        raise ValueError("**")
    return keyword.value.id if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)


def is_import(name: str) -> bool:
    """Tell names of the form `module:Class`."""
    return ":" in name and "=" not in name and not name.startswith("transformers:") and not is_method(name)


def imported(name: str) -> Callable[..., Any]:
    """The class or function called `module:name`."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("row", "must be module:Class that can be imported", name, f"{error}.") from error
    if not callable(found):
        raise ConfigError("row", "must name a class or a function", name, f"{attribute} is a {type(found).__name__}.")
    return found
