"""The methods by name, and the draft heads that are theirs.

Each folder of this package with a `method.py` is one; others are added by `register`.

    method = resolve("ngram")                       # the entry of "prompt_lookup"
    drafter = method.make(method.config_class(), DrafterContext(MethodState()))
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from hf_specdec import methods
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.entry import HeadKind, Method, Source

_methods: dict[str, Method] = {}
METHODS: Mapping[str, Method] = MappingProxyType(_methods)


def register(method: Method) -> None:
    """Make a method known by its name, its aliases and its arguments of `generate`.

    Raises:
        ConfigError: another method has one of them.
    """
    taken = [name for other in METHODS.values() for name in _names_of(other)]
    for name in _names_of(method):
        if name in ("none", *taken):
            raise ConfigError("method", "must have names that no other method has", name, "Choose another name.")
    _methods[method.name] = method


def _names_of(method: Method) -> tuple[str, ...]:
    return (method.name, *method.aliases, *method.config_arguments)


def resolve(name: str) -> Method:
    """Get the method called `name`, by its name or an alias.

    Raises:
        ConfigError: there is none; the error names the nearest match.
    """
    for method in METHODS.values():
        if name == method.name or name in method.aliases:
            return method
    aliases = [alias for method in METHODS.values() for alias in method.aliases]
    raise unknown_name("spec_method", name, ["none", *METHODS], aliases)


def config_arguments() -> dict[str, Method]:
    """Arguments of `generate` that carry a configuration, and the method each belongs to."""
    return {argument: method for method in METHODS.values() for argument in method.config_arguments}


def sources() -> dict[str, Source]:
    """Origins of drafted tokens that any method names, by their keys."""
    return {source.key: source for method in METHODS.values() for source in method.sources}


def head_kinds() -> Iterator[HeadKind]:
    """Kinds of draft heads."""
    return (method.head for method in METHODS.values() if method.head is not None)


def head_kind_of(values: Mapping[str, Any]) -> HeadKind | None:
    """Get the kind of the draft head that a config.json describes; `None` where it describes none."""
    return next((kind for kind in head_kinds() if kind.is_config(values)), None)


for _folder in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
    if _folder.ispkg and find_spec(f"{_folder.name}.method") is not None:
        register(importlib.import_module(f"{_folder.name}.method").METHOD)
