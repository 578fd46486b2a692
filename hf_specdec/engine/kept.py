"""The cache around a forward of several tokens: what stays of it, and what the caller's own cache holds in the end.

cache = kept_cache(model_kwargs["past_key_values"], reserve=512)
model(..., past_key_values=cache.model_cache)
advances = cache.commit(paths, num_columns)
cache.close()
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hf_specdec import compat
from hf_specdec.cache import SpecCache
from hf_specdec.errors import UnsupportedModelError

__all__ = ["KeptCache", "kept_cache"]


class KeptCache(Protocol):
    """What the engine asks of a cache.

    Attributes:
        model_cache: what the model's forward gets.
        takes_trees (`bool`): whether any path can be kept, or only the beginning of a chain.
        drops_rows (`bool`): whether `select` works.
    """

    model_cache: Any
    takes_trees: bool
    drops_rows: bool

    def settle(self) -> None:
        """Take over the prompt's columns."""

    def commit(self, paths: Sequence[Sequence[int]], num_columns: int) -> list[int]:
        """Keep what can be kept of each row's columns in its path, of the `num_columns` written since the last commit.

        Returns how many of each path are kept; what is not has to be computed again.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""

    def rollback(self) -> None:
        """Forget a forward that did not finish."""

    def close(self) -> None:
        """Leave the caller's cache as plain generation would. Rows are equally long."""


def kept_cache(cache: Any, *, reserve: int, in_step: bool = False) -> KeptCache:
    """The best way to keep `cache`, with room for `reserve` tokens where that can be said beforehand.

    Args:
        in_step: keep the rows of a batch equally long, for models that cannot tell them apart.

    Raises:
        UnsupportedModelError: it is no cache that could be rolled back.
    """
    inner = getattr(cache, "self_attention_cache", cache)
    if not isinstance(inner, compat.DynamicCache):
        raise UnsupportedModelError("the cache is not one of transformers' dynamic key/value caches")
    if inner.layers and all(inner.is_linear):
        raise UnsupportedModelError("a recurrent state cannot be rolled back")
    spec = SpecCache.adopt(inner, reserve=reserve)
    return _Adopted(cache, spec, in_step) if spec is not None else _Cropped(cache)


class _Adopted:
    """Attention only: a `SpecCache` in place of the caller's cache, which gets the text's columns in the end."""

    takes_trees = True
    drops_rows = True

    def __init__(self, original: Any, spec: SpecCache, in_step: bool) -> None:
        self.spec, self.in_step = spec, in_step
        self.original = getattr(original, "self_attention_cache", original)
        self.model_cache: Any = spec
        if isinstance(original, compat.EncoderDecoderCache):
            self.model_cache = compat.EncoderDecoderCache(spec, original.cross_attention_cache)
            self.model_cache.is_updated = original.is_updated

    def settle(self) -> None:
        self.spec.settle()

    def commit(self, paths: Sequence[Sequence[int]], num_columns: int) -> list[int]:
        if self.in_step and len(paths) > 1:
            common = min(len(path) for path in paths)
            paths = [path[:common] for path in paths]
        self.spec.commit(paths)
        return [len(path) for path in paths]

    def select(self, rows: Sequence[int]) -> None:
        self.spec.select(rows)
        if isinstance(self.model_cache, compat.EncoderDecoderCache):
            self.model_cache.cross_attention_cache.batch_select_indices(torch.tensor(rows))

    def rollback(self) -> None:
        self.spec.rollback()

    def close(self) -> None:
        self.spec.hand_back(self.original)


class _Cropped:
    """Convolution states beside attention: the caller's own cache, cropped after each forward. Chains only."""

    takes_trees = False
    drops_rows = False

    def __init__(self, original: Any) -> None:
        self.model_cache = original
        self._layers = getattr(original, "self_attention_cache", original).layers
        self._recorded = [getattr(layer, "record_past", None) for layer in self._layers]
        original.activate_past_recording()

    def settle(self) -> None:
        if not self.model_cache.is_croppable:
            raise UnsupportedModelError("a recurrent state cannot be rolled back")
        self.model_cache.crop(0)

    def commit(self, paths: Sequence[Sequence[int]], num_columns: int) -> list[int]:
        kept = min(len(path) for path in paths)
        assert all(list(path) == list(range(len(path))) for path in paths), "only a chain can be kept by cropping"
        self.model_cache.crop(kept - num_columns)
        return [kept] * len(paths)

    def select(self, rows: Sequence[int]) -> None:
        raise NotImplementedError("convolution states stay together")

    def rollback(self) -> None:
        """A half-written state stays half-written, as an interrupted forward leaves it in plain generation."""

    def close(self) -> None:
        for layer, recorded in zip(self._layers, self._recorded, strict=False):
            if recorded is not None:
                layer.record_past = recorded
