"""The cache around a forward of several tokens: what stays of it, and what the caller's own cache holds in the end."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from hf_specdec.cache.recurrent_state import StateCache
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.transfer import HOST
from hf_specdec.errors import UnsupportedModelError


def rollback_cache(
    cache: Any,
    reserve: int,
    *,
    fixed: FixedShapes | None = None,
    kept: StaticSpecCache | None = None,
    left_out: Sequence[int] = (),
    records: bool = False,
) -> "RollbackCache":
    """The best way to keep `cache`, with room for `reserve` tokens where that can be said beforehand.

    Args:
        cache: the caller's; `None` where the model makes its own.
        fixed: the shapes to keep, where `cache` is a static one.
        kept: an empty cache of these shapes, to be used where `cache` is empty too.
        left_out: layers that hold nothing of the text.
        records: whether forwards are recorded where layers have states.

    Raises:
        UnsupportedModelError: it is no cache that could be rolled back.
    """
    inner = getattr(cache, "self_attention_cache", cache)
    static = None
    if fixed is not None:
        is_usable = kept is not None and kept.has_layers_of(inner) and int(inner.get_seq_length()) == 0
        static = kept if is_usable else StaticSpecCache.of(inner, capacity=fixed.capacity)
    if static is not None:
        return AttentionCache(cache, static)
    is_resizable = isinstance(inner, DynamicCache | StaticCache)
    if isinstance(inner, Cache) and (not is_resizable or inner.offloading):
        raise UnsupportedModelError("the cache is not one of transformers' dynamic key/value caches")
    spec = None if inner is None else SpecCache.adopt(inner, reserve=reserve, left_out=left_out, records=records)
    return AttentionCache(cache, spec) if spec is not None else StateCache(cache)


class AttentionCache:
    """A `SpecCache` in place of the caller's cache, which gets the text's columns in the end.

    Attributes:
        spec: the columns.
        model_cache: what the model's forward gets.
        handed_out: the caller's cache, or the one that the model has made.
        supports_row_removal (`bool`): whether `select` works.
    """

    def __init__(self, original: Any, spec: SpecCache) -> None:
        self.spec = spec
        self.supports_row_removal = not isinstance(spec, StaticSpecCache)  # which keeps its shapes
        self.handed_out = original
        self.original = getattr(original, "self_attention_cache", original)
        self.model_cache: Any = spec
        if isinstance(original, EncoderDecoderCache):
            self.model_cache = EncoderDecoderCache(spec, original.cross_attention_cache)
            self.model_cache.is_updated = original.is_updated

    def adopt_prefill(self, cache: Any) -> "RollbackCache":
        """Take over the prompt's columns, `cache` being what the model's output names; returns what to go on with."""
        if isinstance(cache, EncoderDecoderCache) and cache.self_attention_cache is self.model_cache:
            self.model_cache = cache  # the model has put one for its cross-attention next to it
            self.handed_out = EncoderDecoderCache(self.original, cache.cross_attention_cache)
        if cache is not self.model_cache:  # the model took its own
            if isinstance(cache, DynamicCache):
                return rollback_cache(cache, reserve=self.spec.reserve)
            copied = StateCache(cache)
            copied.handed_out = self.handed_out
            return copied
        self.spec.sync()
        return self

    def checkpoint(self, num_columns: int) -> None:
        """Called before each forward, with the columns written since the last commit; nothing is lost by writing."""

    def commit(self, paths: Sequence[Sequence[int]], num_columns: int) -> list[int]:
        """Keep each row's columns in its path, of the `num_columns` written since the last commit.

        Returns how many of each path are kept; what is not has to be computed again.
        """
        self.spec.commit(paths)
        return [len(path) for path in paths]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.spec.select(rows)
        if isinstance(self.model_cache, EncoderDecoderCache):
            self.model_cache.cross_attention_cache.batch_select_indices(torch.tensor(rows, device=HOST))

    def rollback(self) -> None:
        """Forget a forward that did not finish."""
        self.spec.rollback()

    def forget(self, num_columns: int) -> None:
        """Forget the `num_columns` written since the last commit, and their numbers, which may not be finite."""
        self.spec.rollback()
        self.spec.clear_ahead(num_columns)

    def close(self) -> None:
        """Leave the caller's cache as plain generation would; after an error as far as all rows have their texts."""
        # States cannot be cut to the shortest row, as keys can: the caller's cache stays as it was before the call.
        if not self.spec.states or len(set(self.spec.lengths)) == 1:
            self.spec.export(self.original)


RollbackCache = AttentionCache | StateCache  # any path of columns, or one row's chain in the caller's own cache
