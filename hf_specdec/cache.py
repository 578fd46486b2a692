"""The key/value cache of speculative decoding: preallocated, with a length per row, rolled back for free.

``update`` writes a forward's T new columns behind each row's text and returns views; ``commit`` keeps those columns
whose tokens were accepted, moving them together where they are not; whatever else was written is overwritten by
the next forward. Between forwards it behaves like a `DynamicCache` whose sliding layers keep everything: the mask
carries the window. Knows nothing about trees, models or tokens.

    cache = SpecCache.adopt(dynamic_cache, reserve=512)
    model(..., past_key_values=cache)
    cache.settle()                       # the prompt's columns
    model(..., past_key_values=cache)
    cache.commit([[0, 2, 3]])            # row 0 keeps the first, third and fourth of the columns just written
    cache.hand_back(dynamic_cache)       # the text's columns, as plain generation would have left them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.compat import Cache, CacheLayerMixin, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["SpecCache", "SpecLayer"]

MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Move:
    """Columns of one row that change place: from `source` (relative to the row's start) to `start` and following."""

    row: int
    start: int
    source: torch.Tensor


class SpecLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `(batch, heads, capacity, head_dim)`, filled up to each row's length.

    Attributes:
        lengths (`tuple[int, ...]`): tokens seen by each row, those before `offset` counted.
        starts (`tuple[int, ...]`): the lengths before the last `update`.
        offset (`int`): tokens at the front whose columns are gone (an adopted sliding window).
        is_sliding (`bool`): whether the model puts a window on this layer; transformers sizes masks by it.
    """

    is_croppable = True

    def __init__(self, *, reserve: int = 0, is_sliding: bool = False) -> None:
        super().__init__()
        self.reserve = reserve
        self.is_sliding = is_sliding
        self.offset = 0
        self.lengths: tuple[int, ...] = ()
        self.starts: tuple[int, ...] = ()
        self.length = 0  # of the longest row

    def set_lengths(self, lengths: tuple[int, ...]) -> None:
        """Make `lengths` the rows' lengths; columns behind them are free."""
        self.lengths = self.starts = lengths
        self.length = max(lengths, default=0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers for tensors shaped like these, `(batch, heads, T, head_dim)`; both head_dims may differ."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.reserve - self.offset, key_states.shape[-2], MIN_CAPACITY)
        self.keys = _empty(key_states, capacity)
        self.values = _empty(value_states, capacity)
        self.set_lengths(self.lengths or (self.offset,) * key_states.shape[0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T columns behind each row and return views up to the longest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        start = self.length - self.offset
        end = start + new
        if end > self.keys.shape[-2]:
            self._grow(end)
        if len(self.lengths) == 1 or min(self.lengths) == self.length:
            self.keys.narrow(2, start, new).copy_(key_states)
            self.values.narrow(2, start, new).copy_(value_states)
        else:
            for row, length in enumerate(self.lengths):
                columns = slice(length - self.offset, length - self.offset + new)
                self.keys[row, :, columns] = key_states[row]
                self.values[row, :, columns] = value_states[row]
        self.starts = self.lengths
        self.lengths = tuple([length + new for length in self.lengths])
        self.length += new
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def keep(self, lengths: tuple[int, ...], moves: Sequence[Move]) -> None:
        """Move accepted columns to the front of what the last `update` wrote and set the rows' lengths."""
        for move in moves:
            start = self.starts[move.row] - self.offset
            source = move.source.to(self.keys.device) + start
            into = slice(start + move.start, start + move.start + len(source))
            self.keys[move.row, :, into] = self.keys[move.row, :, source]
            self.values[move.row, :, into] = self.values[move.row, :, source]
        self.set_lengths(lengths)

    def content(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the text, views of `(batch, heads, length - offset, head_dim)`."""
        end = self.length - self.offset
        return self.keys[:, :, :end], self.values[:, :, :end]

    def load(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Start from existing columns that end at token `length`."""
        self.offset = length - keys.shape[-2]
        self.lazy_initialization(keys, values)
        self.update(keys, values)
        self.set_lengths(self.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a forward of `query_length` tokens attends to, and the position of the first of them."""
        return self.length + query_length - self.offset, self.offset

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self.length

    def get_max_length(self) -> int:
        """-1: grows without a bound."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row (a negative number, as in transformers)."""
        self.set_lengths(tuple(max(length - abs(tokens_to_remove), 0) for length in self.lengths))

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.offset = 0
        self.set_lengths((0,) * len(self.lengths))

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self.keys.shape[-2] * 3 // 2)
        used = self.length - self.offset
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _empty(old, capacity)
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)


class SpecCache(Cache):
    """One `SpecLayer` per attention layer; layers that share another's keys stay the model's own dummies.

    Attributes:
        lengths (`tuple[int, ...]`): tokens of each row that are committed; empty before the first forward.
    """

    def __init__(self, layers: list[Any] | None = None, *, reserve: int = 0) -> None:
        super().__init__(layers=layers or [])
        self.reserve = reserve
        self.lengths: tuple[int, ...] = ()
        self._written: list[SpecLayer] = []
        self.settle()

    @classmethod
    def adopt(cls, cache: Cache, *, reserve: int = 0) -> "SpecCache | None":
        """A cache with the same content and structure, or `None` where a layer is not plain attention.

        Args:
            cache: a `DynamicCache`, empty or not; it is left as it is.
            reserve (`int`): tokens to allocate room for at once.
        """
        if not isinstance(cache, DynamicCache) or cache.offloading:
            return None
        layers: list[Any] = []
        for layer in cache.layers:
            if type(layer) is DummyLayer:
                layers.append(layer)
                continue
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return None
            spec = SpecLayer(reserve=reserve, is_sliding=isinstance(layer, DynamicSlidingWindowLayer))
            if layer.is_initialized and layer.get_seq_length():
                spec.load(layer.keys, layer.values, layer.get_seq_length())
            layers.append(spec)
        return cls(layers, reserve=reserve)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new columns; layers come into being as the model names them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SpecLayer(reserve=self.reserve))
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def settle(self) -> None:
        """Take over whatever the forwards since the last commit have written."""
        self._written = [layer for layer in self.layers if isinstance(layer, SpecLayer) and layer.is_initialized]
        self.lengths = self._written[0].lengths if self._written else ()

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the columns of the last forward, those in `paths`: one list of column numbers a row, ascending."""
        written = self._written
        self.lengths = tuple([length + len(path) for length, path in zip(self.lengths, paths, strict=True)])
        if not written or written[0].lengths == self.lengths:
            return  # every column is kept where it is
        moves = []
        for row, path in enumerate(paths):
            in_place = next((i for i, column in enumerate(path) if column != i), len(path))
            if in_place < len(path):
                moves.append(Move(row, in_place, torch.tensor(path[in_place:], dtype=torch.long)))
        for layer in written:
            layer.keep(self.lengths, moves)

    def rollback(self) -> None:
        """Forget a forward that did not finish, on whichever layers it has written."""
        for layer in self.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.set_lengths(self.lengths or (0,) * len(layer.lengths))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row."""
        super().crop(tokens_to_remove)
        self.settle()

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.settle()

    def hand_back(self, cache: DynamicCache) -> None:
        """Put the text's columns where plain generation would have left them. Rows must be equally long."""
        while len(cache.layers) < len(self.layers):
            cache.layers.append(DynamicLayer())
        for own, layer in zip(self.layers, cache.layers, strict=True):
            if not isinstance(own, SpecLayer) or not own.is_initialized:
                continue
            keys, values = own.content()
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            if isinstance(layer, DynamicSlidingWindowLayer):
                window = slice(max(keys.shape[-2] - layer.sliding_window + 1, 0), None)
                keys, values = keys[:, :, window], values[:, :, window]
                layer.cumulative_length = own.length
            layer.keys, layer.values = keys.clone(), values.clone()


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, head_dim = like.shape
    return like.new_zeros((batch, heads, capacity, head_dim))
