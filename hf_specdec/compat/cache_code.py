"""Code that may change a cache: hooks and replaced forwards, which may evict keys and values, and classes of caches.

Where a cache has a class, or a replaced method, that transformers does not have, nothing can be said of taking tokens
back: such code may keep, drop or change columns in any way.

Names                              Why
`_forward_hooks`, `_forward_pre_hooks` and the global ones of torch
                                   code that runs with a module's forward and may reach the cache by its arguments
`__code__`, `__closure__`          the names that such code reads, and the objects that it holds
"""

import functools
import inspect
import os
from abc import ABC
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import Cache, PreTrainedModel, cache_utils

from hf_specdec.compat.caches import CACHE_NAMES, OLD_NAMES
from hf_specdec.compat.fingerprint import GLOBAL_HOOKS, HOOKS, is_harmless
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.peft_hooks import is_adapter_hook

LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "bitsandbytes.", "hf_specdec.")
CACHES = frozenset({*CACHE_NAMES, *OLD_NAMES, "past_key_value", "layer_past"} - {"state"})  # names in code
FOLDERS = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (cache_utils, torch))
CONTAINERS = (list, tuple, dict, torch.Tensor)  # states of RWKV and its like
MOST_CALLS = 3  # of one function by another that are followed


def code_with_cache(model: PreTrainedModel) -> str | None:
    """Name of a hook, or of a forward put in a library's place, that reads a cache; `None` without any.

    Code reads a cache that it names, or holds, or that is named by code of the same hand which it calls.
    """
    for kind, function, owner in _added_code(model):
        if _is_foreign(function) and _reads_cache(function):
            return f"{kind} {_name_of(function)} of {owner}"
    return None


def _added_code(model: PreTrainedModel) -> Iterator[tuple[str, Any, str]]:
    """Hooks and forwards that do not come with the modules' classes: what each is, itself, and the class it is of."""
    modules = modules_of(model)
    for cls in dict.fromkeys(type(module) for module in modules):
        if cls.__module__.startswith(LIBRARIES):
            yield "forward", cls.forward, cls.__name__
    for attributes, cls in ((vars(module), type(module)) for module in modules):
        if (own := attributes.get("forward")) is not None:
            yield "forward", own, cls.__name__
        for name in HOOKS:
            if attributes.get(name):
                yield from (("hook", hook, cls.__name__) for hook in tuple(attributes[name].values()))
    for name in GLOBAL_HOOKS:
        yield from (("hook", hook, "all modules") for hook in tuple(getattr(torch_module, name).values()))


def _is_foreign(function: Any) -> bool:
    """Returns whether a hook or forward is code that no library brings."""
    while isinstance(function, functools.partial):
        function = function.func
    module = str(getattr(function, "__module__", ""))
    return not (module.startswith(LIBRARIES) or is_harmless(function) or is_adapter_hook(function))


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _reads_cache(function: Any, calls: int = MOST_CALLS) -> bool:
    held = list(_held_by(function))
    if any(isinstance(one, Cache) for one in held):
        return True
    code = _function_of(function)
    if code is None:
        return False
    names = set(_names_in(code.__code__))
    if names & CACHES:
        return True
    owner = getattr(function, "__self__", None)
    called = [*held, *(code.__globals__.get(name) for name in names), *(getattr(owner, name, None) for name in names)]
    called = [one for one in called if callable(one) and not isinstance(one, type) and _is_foreign(one)]
    return calls > 0 and any(_reads_cache(one, calls - 1) for one in called if one is not function)


def _function_of(function: Any) -> FunctionType | None:
    """The Python function that a hook runs, if it is one."""
    while isinstance(function, functools.partial):
        function = function.func
    found = inspect.unwrap(getattr(function, "__func__", function))
    found = found if isinstance(found, FunctionType) else inspect.getattr_static(type(found), "__call__", None)
    return found if isinstance(found, FunctionType) else None


def _names_in(code: CodeType) -> Iterator[str]:
    """Names and strings of a function and of those inside it."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str | tuple):
            yield from (constant,) if isinstance(constant, str) else (one for one in constant if isinstance(one, str))


def _held_by(function: Any) -> Iterator[Any]:
    """Objects that a hook keeps: those of its closure and of its owner, and its bound arguments."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_held_by(function.func))
        return
    for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from tuple(getattr(getattr(function, "__self__", function), "__dict__", {}).values())


def foreign_code(cache: Any) -> str | None:
    """Name of a class or method in a cache that is not transformers' own, or `None`."""
    if cache is None or isinstance(cache, CONTAINERS):
        return None
    inner = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    caches = [cache, *(one for one in inner if one is not None)]
    objects = [*caches, *(layer for one in caches for layer in getattr(one, "layers", ()))]
    lazy = [layer for one in caches if (layer := getattr(one, "layer_class_to_replicate", None)) is not None]
    for cls in dict.fromkeys((*map(type, objects), *lazy)):
        if (found := _foreign_code_of(cls)) is not None:
            return found
    for one in objects:
        for name, value in vars(one).items():
            if callable(value) and callable(getattr(type(one), name, None)):
                return f"{type(one).__name__}.{name}"
    return None


def _foreign_code_of(cls: type) -> str | None:
    """The class's name or that of one of its methods."""
    for base in cls.__mro__:
        if base not in (object, ABC) and not base.__module__.startswith("transformers."):
            return cls.__name__
        for name, value in vars(base).items():
            if not _is_library_code(value):
                return f"{base.__name__}.{name}"
    return None


def _is_library_code(attribute: Any) -> bool:
    """Returns whether an attribute is no function, or one of transformers' or torch's files (of a wrapper, its own)."""
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    return not isinstance(function, FunctionType) or function.__code__.co_filename.startswith(FOLDERS)
