"""The cache around a forward of several tokens: what stays of it, and what the caller's own cache holds in the end.

Columns of attention are kept by their places. States that cannot be rolled back are copied before a forward and put
back when one of its drafts is wrong: nothing of the forward is kept then, and the accepted tokens are computed again
before the next drafts. When every token was right, which it is where nothing was drafted, the forward is kept whole.
Attention layers replace their tensors at each forward, so theirs are remembered and not copied.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.transfer import HOST
from hf_specdec.compat.caches import holds_states, replaced_attributes
from hf_specdec.errors import UnsupportedModelError


class StateCache:
    """The caller's own cache, whatever it holds; `None` until the model has made one. Chains of one row only."""

    supports_row_removal = False
    spec = None

    def __init__(self, cache: Any) -> None:
        self.model_cache = cache
        self.handed_out = cache
        self._checkpoints: list[tuple[int, Any]] = []

    def adopt_prefill(self, cache: Any) -> Any:
        """Take over the prompt's forward; `cache` is what came out of it."""
        self.model_cache = self.handed_out = cache
        self._checkpoints.clear()
        return self

    def checkpoint(self, num_columns: int) -> None:
        """Remember the state before a forward, with `num_columns` written since the last commit."""
        self._checkpoints.append((num_columns, saved(self.model_cache)))

    def commit(self, paths: Sequence[Sequence[int]], num_columns: int) -> list[int]:
        """Keep all columns or, where some are rejected, those before the last checkpoint that lacks them."""
        (path,) = paths
        kept = len(path)
        assert list(path) == list(range(kept)), "only a chain can be kept"
        if kept < num_columns:
            kept, state = next(saved_at for saved_at in reversed(self._checkpoints) if saved_at[0] <= kept)
            restore(self.model_cache, state)
        self._checkpoints.clear()
        return [kept]

    def select(self, rows: Sequence[int]) -> None:
        """Never called: there is one row."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Forget what was written since the last commit."""
        if self._checkpoints:
            restore(self.model_cache, self._checkpoints[0][1])
            self._checkpoints.clear()

    def forget(self, num_columns: int) -> None:
        """As `rollback`: a state has no columns."""
        self.rollback()

    def close(self) -> None:
        """The caller's cache was used all along."""


def saved(value: Any) -> Any:
    """A copy of everything in `value` that a forward may change, for `restore`."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)([saved(item) for item in value])
    if isinstance(value, dict):
        return {name: saved(item) for name, item in value.items()}
    if not holds_states(value):
        return value
    replaced = replaced_attributes(value)
    return {name: item if name in replaced else saved(item) for name, item in vars(value).items()}


def restore(value: Any, copy: Any) -> Any:
    """Put a copy back; lists, dictionaries and objects stay who they are. Returns what stands in place of `value`."""
    if isinstance(copy, list) and isinstance(value, list):
        value[:] = [restore(item, old) for item, old in zip(value, copy, strict=False)]
        return value
    if isinstance(copy, dict) and (isinstance(value, dict) or holds_states(value)):
        items = value if isinstance(value, dict) else vars(value)
        restored = {name: restore(items.get(name), old) for name, old in copy.items()}
        items.clear()
        items.update(restored)
        return value
    return copy


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
