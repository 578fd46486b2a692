"""Code in a cache that transformers does not have: a class, or a method replaced on a class or on an object.

Such code may keep, drop or change columns in any way, so that nothing can be said of taking tokens back.
"""

import os
from abc import ABC
from types import FunctionType
from typing import Any

import torch
from transformers import cache_utils

FOLDERS = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (cache_utils, torch))
CONTAINERS = (list, tuple, dict, torch.Tensor)  # states of RWKV and its like


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
