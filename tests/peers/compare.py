"""Copies of what a call of `generate` is given, and the first difference of what two calls give."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

COPIED = ("transformers.generation", "tests.")  # processors and criteria, which may keep a state


def copied(value: Any) -> Any:
    """The value with tensors, caches, processors and criteria of its own; models and functions are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(one) for one in value)
    if type(value) is dict:
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, Cache) or type(value).__module__.startswith(COPIED):
        return copy.deepcopy(value, {id(one): one.detach().clone() for one in _tensors(value)})
    return value


def difference(plain: Any, other: Any, name: str, tolerance: float) -> str | None:
    """First difference between what two calls give under `name`, `None` where there is none.

    Args:
        tolerance: of values, relative to the largest magnitude of the plain call's tensor.
    """
    if isinstance(plain, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensor_difference(plain, other, name, tolerance)
    if type(plain) is not type(other) or (isinstance(plain, int | float | str) and plain != other):
        return f"{name} is {other!r:.80}, plainly {plain!r:.80}"
    if isinstance(plain, Cache):
        return difference(*map(_contents, (plain, other)), name, tolerance)
    if isinstance(plain, Mapping):
        names = [key for key in {**plain, **other} if key != "spec_stats"]
        return _first(difference(plain.get(key), other.get(key), f"{name}.{key}", tolerance) for key in names)
    if isinstance(plain, list | tuple):
        pairs = itertools.zip_longest(plain, other)
        return _first(difference(one, two, f"{name}[{i}]", tolerance) for i, (one, two) in enumerate(pairs))
    return None


def _tensor_difference(plain: torch.Tensor, other: torch.Tensor, name: str, tolerance: float) -> str | None:
    if plain.shape != other.shape or plain.dtype != other.dtype:
        return f"{name} is {tuple(other.shape)} {other.dtype}, plainly {tuple(plain.shape)} {plain.dtype}"
    if not plain.is_floating_point():
        lines = (str(one.tolist())[-160:] for one in (other, plain))
        return None if torch.equal(plain, other) else f"{name} is {', plainly '.join(lines)}"
    finite = plain.isfinite()
    if not torch.equal(plain[~finite].nan_to_num(), other[~finite].nan_to_num()):
        return f"{name} is infinite or not a number at other places"
    gap, most = ((one[finite].double().abs().amax() if finite.any() else 0.0) for one in (plain - other, plain))
    return f"{name} is off by {gap / most:.1e} of the largest magnitude" if gap > tolerance * most else None


def _contents(cache: Any) -> dict[str, Any]:
    """Classes and tensors of a cache's layers: of static ones the columns that are used."""
    nested = [part for part in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, part)]
    if nested:
        return {part: getattr(cache, part) for part in nested}
    return {"layers": [_layer_contents(layer) for layer in cache.layers]}


def _layer_contents(layer: Any) -> dict[str, Any]:
    length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else None
    values = {key: value for key, value in vars(layer).items() if isinstance(value, torch.Tensor | dict | list)}
    keys = {key: values[key][..., :length, :] for key in ("keys", "values") if key in values}
    return {"class": type(layer).__name__, "length": length, **values, **keys}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside a cache, a processor or a container: those of a graph cannot be copied as they are."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif type(value).__module__.startswith("transformers.") and not isinstance(value, torch.nn.Module):
        yield from _tensors(list(getattr(value, "__dict__", {}).values()))


def _first(found: Iterable[str | None]) -> str | None:
    return next((line for line in found if line is not None), None)
