"""A cache with states that cannot be rolled back: copied before a forward, put back when one of its drafts is wrong.

After a rejection nothing of the forward is kept; the accepted tokens are computed again before the next drafts. When
every token was right, which it is where nothing was drafted, the forward is kept whole. Attention layers replace their
tensors at each forward, so theirs are remembered and not copied.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_specdec.compat.caches import holds_states, replaced_attributes


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


def contents(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a cache, its layers and their lists and dictionaries, in the order of its attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
    elif isinstance(value, dict):
        yield from contents(list(value.values()))
    elif holds_states(value):
        yield from contents(vars(value))
