"""The key/value cache of speculative decoding: preallocated, with a length per row, rolled back for free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_specdec.cache.blocks import Blocks
from hf_specdec.compat import Cache, CacheLayerMixin, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from hf_specdec.transfer import to_device

__all__ = ["SpecCache", "SpecLayer"]

MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Moves:
    """Columns that change place, M of them, all rows together.

    Attributes:
        rows, source, target: `(M,)`: column `source` of row `rows` goes to column `target`; columns count from the
            text's first token.
    """

    rows: list[int]
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> "Moves | None":
        """What brings the columns in `paths` together at each row's start; `None` where they are already."""
        rows: list[int] = []
        source: list[int] = []
        target: list[int] = []
        for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
            for place, column in enumerate(path):
                if place != column:
                    rows.append(row)
                    source.append(start + column)
                    target.append(start + place)
        return cls(rows, source, target) if rows else None

    def on(self, device: torch.device, offset: int) -> list[torch.Tensor]:
        """Rows, sources and targets on `device`, in buffers that begin at column `offset`."""
        source, target = np.array(self.source) - offset, np.array(self.target) - offset
        return to_device((np.array(self.rows), source, target), device)


class WriteIndex:
    """Where rows of different lengths write their new columns; worked out once a forward for all layers."""

    def __init__(self) -> None:
        self._key: tuple[tuple[int, ...], int, torch.device] | None = None
        self._found = (torch.empty(0), torch.empty(0))

    def __call__(self, lengths: tuple[int, ...], new: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers `(batch, 1)` and column numbers `(batch, new)`."""
        if self._key != (lengths, new, device):
            rows = torch.arange(len(lengths), device=device)[:, None]
            columns = torch.tensor(lengths, device=device)[:, None] + torch.arange(new, device=device)
            self._key, self._found = (lengths, new, device), (rows, columns)
        return self._found


@dataclass(frozen=True, slots=True)
class RowReserve:
    """How many rows to allocate at once when rows are admitted.

    Attributes:
        rows (`int`): most rows there will be.
        columns (`int`): bound on rows x capacity, in tokens.
    """

    rows: int = 1
    columns: int = 0

    def of(self, needed: int, capacity: int) -> int:
        """Rows of a buffer with `capacity` columns, at least those that are needed now."""
        return max(needed, min(self.rows, self.columns // capacity))


class SpecLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `(rows, heads, capacity, head_dim)`, filled up to each row's length.

    The first `len(lengths)` rows are the batch; there may be more, for sequences to come.

    Attributes:
        blocks (`Blocks`): where the buffers come from.
        buffers: the blocks that the keys and the values are in; one where both have a shape.
        lengths (`tuple[int, ...]`): tokens seen by each row, those before `offset` counted.
        offset (`int`): tokens at the front whose columns are gone (an adopted sliding window).
        is_sliding (`bool`): whether the model puts a window on this layer; transformers sizes masks by it.
    """

    is_croppable = True

    def __init__(
        self,
        *,
        reserve: int = 0,
        is_sliding: bool = False,
        places: "WriteIndex | None" = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks or Blocks(1)
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.places = places or WriteIndex()
        self.reserve, self.row_reserve = reserve, RowReserve()
        self.is_sliding = is_sliding
        self.offset = 0
        self.lengths: tuple[int, ...] = ()
        self.length = 0  # of the longest row

    def set_lengths(self, lengths: tuple[int, ...]) -> None:
        """Make `lengths` the rows' lengths; columns after them are free."""
        self.lengths = lengths
        self.length = max(lengths, default=0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers for tensors shaped like these, `(batch, heads, T, head_dim)`; both head_dims may differ."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.reserve - self.offset, key_states.shape[-2], MIN_CAPACITY)
        batch = key_states.shape[0]
        self._allocate(
            (batch, key_states.shape[1], capacity, key_states.shape[3]),
            (batch, value_states.shape[1], capacity, value_states.shape[3]),
            key_states,
        )
        self.set_lengths(self.lengths or (self.offset,) * key_states.shape[0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T columns after each row and return views up to the longest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, new = len(self.lengths), key_states.shape[-2]
        start = self.length - self.offset
        end = start + new
        if end > self.keys.shape[-2]:
            self._grow(end)
        if len(self.lengths) == 1 or min(self.lengths) == self.length:
            self.keys[:batch, :, start:end] = key_states
            self.values[:batch, :, start:end] = value_states
        else:
            rows, columns = self.places(self.lengths, new, self.keys.device)
            self.keys[rows, :, columns - self.offset] = key_states.transpose(1, 2)
            self.values[rows, :, columns - self.offset] = value_states.transpose(1, 2)
        self.lengths = tuple([length + new for length in self.lengths])
        self.length += new
        return self.keys[:batch, :, :end], self.values[:batch, :, :end]  # (batch, heads, end, head_dim)

    def _allocate(self, keys: tuple[int, ...], values: tuple[int, ...], like: torch.Tensor) -> None:
        """Buffers of zeros of these shapes."""
        per_layer = 2 if keys == values else 1
        self.keys, block = self.blocks.take(keys, like, per_layer=per_layer)
        self.values, other = self.blocks.take(values, like, per_layer=per_layer)
        self.buffers = (block,) if other is block else (block, other)

    def select(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, in this order."""
        index, spare = rows.to(self.keys.device), self.keys.shape[0] > len(self.lengths) or self.row_reserve.rows > 1
        if spare:  # rows to come will need the place
            self.keys[: len(rows)], self.values[: len(rows)] = self.keys[index], self.values[index]
        else:
            keys, values = self.keys, self.values
            self._allocate((len(rows), *keys.shape[1:]), (len(rows), *values.shape[1:]), keys)
            torch.index_select(keys, 0, index, out=self.keys)
            torch.index_select(values, 0, index, out=self.values)
        self.set_lengths(tuple([self.lengths[row] for row in rows.tolist()]))

    def admit(self, other: "SpecLayer", row: int | None) -> None:
        """Take over the one row of `other`, in the place of row `row`, or after the last row."""
        assert not self.offset and not other.offset, "windows that were cut have no beginning to line up"
        length, row = other.length, len(self.lengths) if row is None else row
        if length > self.keys.shape[-2] or row >= self.keys.shape[0]:
            self._grow(length, rows=row + 1)
        self.keys[row, :, :length] = other.keys[0, :, :length]
        self.values[row, :, :length] = other.values[0, :, :length]
        self.set_lengths((*self.lengths[:row], length, *self.lengths[row + 1 :]))

    def content(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the text, as far as all rows have it: views of `(batch, heads, length, head_dim)`."""
        end = min(self.lengths) - self.offset
        batch = len(self.lengths)
        return self.keys[:batch, :, :end], self.values[:batch, :, :end]

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

    def _grow(self, needed: int, *, rows: int = 0) -> None:
        """Make room for `needed` columns, by half at least, and for `rows`, with those in reserve."""
        capacity, batch = self.keys.shape[-2], len(self.lengths)
        capacity = capacity if needed <= capacity else max(needed, capacity * 3 // 2)
        rows = self.row_reserve.of(max(rows, batch), capacity)
        used = self.length - self.offset
        keys, values = self.keys, self.values
        heads_dims = [(old.shape[1], capacity, old.shape[3]) for old in (keys, values)]
        self._allocate((rows, *heads_dims[0]), (rows, *heads_dims[1]), keys)
        self.keys[:batch, :, :used] = keys[:batch, :, :used]
        self.values[:batch, :, :used] = values[:batch, :, :used]


class SpecCache(Cache):
    """One `SpecLayer` per attention layer; layers that share another's keys stay the model's own dummies.

    Attributes:
        lengths (`tuple[int, ...]`): tokens of each row that are committed; empty before the first forward.
        dtype (`torch.dtype | None`): of the keys; `None` before the first forward, or where layers differ.
    """

    def __init__(self, layers: list[Any] | None = None, *, reserve: int = 0) -> None:
        super().__init__(layers=layers or [])
        self.reserve = reserve
        self._places = WriteIndex()
        for layer in self.layers:
            if isinstance(layer, SpecLayer):
                layer.places = self._places
        self.lengths: tuple[int, ...] = ()
        self._written: list[SpecLayer] = []
        self.sync()

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
        blocks = Blocks(max(len(cache.layers), 1))
        for layer in cache.layers:
            if type(layer) is DummyLayer:
                layers.append(layer)
                continue
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return None
            is_sliding = isinstance(layer, DynamicSlidingWindowLayer)
            spec = SpecLayer(reserve=reserve, is_sliding=is_sliding, blocks=blocks)
            if layer.is_initialized and layer.get_seq_length():
                spec.load(layer.keys, layer.values, layer.get_seq_length())
            layers.append(spec)
        return cls(layers, reserve=reserve)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new columns; layers come into being as the model names them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SpecLayer(reserve=self.reserve, places=self._places))
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def sync(self) -> None:
        """Take over whatever the forwards since the last commit have written."""
        self._written = [layer for layer in self.layers if isinstance(layer, SpecLayer) and layer.is_initialized]
        self.lengths = self._written[0].lengths if self._written else ()
        dtypes = {layer.keys.dtype for layer in self._written}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the columns written since the last commit, those in `paths`: a row's column numbers, ascending."""
        written = self._written
        starts = self.lengths
        self.lengths = tuple([length + len(path) for length, path in zip(starts, paths, strict=True)])
        moves = Moves.of(starts, paths)
        if moves is None and written and written[0].lengths == self.lengths:
            return  # every column is kept where it is
        if moves is not None:
            self._move(moves)
        for layer in written:
            layer.set_lengths(self.lengths)

    def _move(self, moves: Moves) -> None:
        """Move columns in all layers, those of a block at once."""
        blocks = {(id(block), layer.offset): block for layer in self._written for block in layer.buffers}
        indices: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for (_, offset), block in blocks.items():
            where = (block.device, offset)
            if where not in indices:
                indices[where] = moves.on(*where)
            rows, source, target = indices[where]
            block[:, rows, :, target] = block[:, rows, :, source]  # (M, buffers, heads, head_dim)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order; nothing may be uncommitted."""
        index = torch.tensor(rows)
        for layer in self.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.select(index)
        self.sync()

    def reserve_rows(self, rows: int, columns: int) -> None:
        """Allocate for `rows` rows at once when a second one is admitted, with rows x capacity at most `columns`."""
        for layer in self.layers:
            if isinstance(layer, SpecLayer):
                layer.row_reserve = RowReserve(rows, columns)

    def admit(self, other: "SpecCache", row: int | None = None) -> None:
        """Take over the one row of `other`, in the place of `row` or after the last; nothing may be uncommitted."""
        for own, new in zip(self.layers, other.layers, strict=True):
            if isinstance(own, SpecLayer) and own.is_initialized:
                own.admit(new, row)
        self.sync()

    def copy_prefix(self, donor: "SpecCache", row: int, length: int) -> None:
        """Start, empty as it is, with the first `length` columns of a row of `donor`."""
        blocks = Blocks(max(len(donor.layers), 1))
        while len(self.layers) < len(donor.layers):
            self.layers.append(SpecLayer(reserve=self.reserve, places=self._places, blocks=blocks))
        for own, other in zip(self.layers, donor.layers, strict=True):
            if isinstance(own, SpecLayer) and other.is_initialized:
                own.load(other.keys[row : row + 1, :, :length], other.values[row : row + 1, :, :length], length)
        self.sync()

    def rollback(self) -> None:
        """Forget a forward that did not finish, on whichever layers it has written."""
        for layer in self.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.set_lengths(self.lengths or (0,) * len(layer.lengths))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row."""
        super().crop(tokens_to_remove)
        self.sync()

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.sync()

    def export(self, cache: Cache) -> None:
        """Put the text's columns where plain generation would have left them, as far as all rows have them."""
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
                layer.cumulative_length = min(own.lengths)
            layer.keys, layer.values = keys.clone(), values.clone()
