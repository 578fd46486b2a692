"""Equality of functions and objects over time, without keeping them alive: of hooks, forwards and their owners."""

import functools
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, cast

import torch

EXACT = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
DEEPEST = 4  # functions within functions


class Same:
    """Equal to another one of the same living object; keeps it from being mistaken for one made in its place later."""

    __slots__ = ("number", "reference")

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        self.reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self.reference()) is not None and value is other.reference()


def same(value: Any) -> Hashable:
    """A key of one object or function; a bound method is made anew each time that it is asked for."""
    if isinstance(value, types.MethodType):
        return same(value.__self__), same(value.__func__)
    try:
        return Same(value)
    except TypeError:  # a class without weak references
        return id(value)


class SameCode:
    """Equal to another one of the same living function, or of one that runs the same code over equal values.

    A context manager may register closures, methods or objects anew for each call. Values are those at the first sight
    of a function, which may count its calls in them.
    """

    __slots__ = ("code", "owner", "values")

    def __init__(self, function: Any, depth: int = 0) -> None:
        self.owner = same(getattr(function, "__self__", function))
        self.code, self.values = _code_and_values(function, depth)

    def __hash__(self) -> int:
        return hash(self.code)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameCode) or self.code != other.code:
            return False
        return self.owner == other.owner or (self.values is not None and self.values == other.values)


def _code_and_values(function: Any, depth: int) -> tuple[Hashable, tuple[Hashable, ...] | None]:
    """A function's code, and what it may read besides its arguments and globals; `None` where that does not show."""
    if isinstance(function, functools.partial):
        code, values = _code_and_values(function.func, depth)
        given = _values((*function.args, *function.keywords.items()), depth)
        return code, None if values is None else (*values, given)
    if isinstance(function, types.MethodType):
        return _code_of(function.__func__), _attributes(function.__self__, depth)
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        return _code_of(function), _values((*defaults, *cells), depth)
    return cast(Hashable, type(function)), _attributes(function, depth)


def _code_of(function: Any) -> Hashable:
    """Code in its module's names."""
    return getattr(function, "__code__", function), id(getattr(function, "__globals__", None))


def _attributes(owner: Any, depth: int) -> tuple[Hashable, ...] | None:
    """An object's class and attributes; `None` of modules and of objects that do not show theirs."""
    attributes = getattr(owner, "__dict__", None)
    if isinstance(owner, torch.nn.Module) or not isinstance(attributes, Mapping):
        return None
    return cast(Hashable, type(owner)), _values(tuple(attributes.items()), depth)


def _values(values: tuple[Any, ...], depth: int) -> tuple[Hashable, ...]:
    return tuple(_value(value, depth + 1) for value in values)


def _value(value: Any, depth: int) -> Hashable:
    """Numbers, words and types by what they are, functions by what they run, all else by identity."""
    if isinstance(value, EXACT):
        return type(value), value
    if type(value) is tuple:
        return _values(value, depth)
    if isinstance(value, FUNCTIONS) and depth < DEEPEST:
        return SameCode(value, depth)
    return same(value)
