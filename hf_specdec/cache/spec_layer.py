"""One layer of the key/value cache: preallocated buffers, with a length per row.

Buffers of several layers lie in one block of memory, so that columns move in all of them by one operation.
"""

from typing import Any

import torch
from transformers import CacheLayerMixin

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.transfer import HOST, upload
from hf_specdec.compat.caches import VALUES_KEEP_DTYPE

MIN_CAPACITY = 64
BLOCK_BYTES = 512 << 20  # bounds what a growing cache holds twice, and what layers of other shapes leave unused


class Blocks:
    """Hands out buffers of equal shape, one after the other from the same block.

    Args:
        num_layers (`int`): how many ask for buffers of a shape, if all layers are alike.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._open: dict[tuple[object, ...], tuple[torch.Tensor, int]] = {}  # the block and how many are handed out
        self._handed_out: dict[tuple[object, ...], int] = {}

    def take(
        self, shape: tuple[int, ...], like: torch.Tensor, *, per_layer: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer of zeros of this shape, and the block `(buffers, *shape)` that it is in.

        Args:
            like: has the dtype and the device.
            per_layer (`int`): buffers of this shape that each layer takes.
        """
        key = (shape, like.dtype, like.device)
        block, used = self._open.pop(key, (None, 0))
        total, handed_out = per_layer * self.num_layers, self._handed_out.get(key, 0)
        if block is None:
            fitting = BLOCK_BYTES // max(like.itemsize * torch.Size(shape).numel(), 1)
            block = like.new_zeros((max(1, min(total - handed_out % total, fitting)), *shape))
        if used + 1 < len(block):
            self._open[key] = (block, used + 1)
        self._handed_out[key] = handed_out + 1
        return block[used], block


class WriteIndex:
    """Write positions of rows of different lengths; computed once a forward for all layers.

    Attributes:
        packed (`PackedRows | None`): of the next forward, where its rows come packed.
    """

    def __init__(self) -> None:
        self.packed: PackedRows | None = None
        self._key: tuple[tuple[int, ...], int, torch.device, PackedRows | None] | None = None
        self._index = (torch.empty(0), torch.empty(0))

    def __call__(self, lengths: tuple[int, ...], new: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers `(batch, 1)` and column numbers `(batch, new)`; `(1, N)` each where rows are packed."""
        if self._key != (key := (lengths, new, device, self.packed)):
            starts = upload(torch.tensor(lengths, device=HOST), device)
            if (packed := self.packed) is not None:
                rows, columns = packed.rows[None], (starts[packed.rows] + packed.columns)[None]
            else:
                rows = torch.arange(len(lengths), device=device)[:, None]
                columns = starts[:, None] + torch.arange(new, device=device)
            self._key, self._index = key, (rows, columns)
        return self._index


class SpecLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `(rows, heads, capacity, head_dim)`, filled up to each row's length.

    The first `len(lengths)` rows are the batch; there may be more, for sequences to come.

    Attributes:
        blocks (`Blocks`): where the buffers come from.
        buffers: the blocks that the keys and the values are in; one where both have a shape.
        lengths (`tuple[int, ...]`): tokens seen by each row, those before `offset` counted.
        offset (`int`): tokens at the front whose columns are gone (an adopted sliding window).
        row_reserve (`tuple[int, int]`): rows to allocate for at once, and the bound on rows x capacity, in tokens.
        is_sliding (`bool`): whether the model puts a window on this layer; transformers sizes masks by it.
    """

    is_croppable = True

    def __init__(
        self,
        *,
        reserve: int = 0,
        is_sliding: bool = False,
        write_index: "WriteIndex | None" = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks or Blocks(1)
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.write_index = write_index or WriteIndex()
        self.reserve, self.row_reserve = reserve, (1, 0)
        self.is_sliding = is_sliding
        self.offset = 0
        self.lengths: tuple[int, ...] = ()
        self.length = 0  # of the longest row

    def make_room(self, columns: int) -> None:
        """Have at least as many columns."""
        if columns > self.keys.shape[-2]:
            self._grow(columns)

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
            value_states if VALUES_KEEP_DTYPE else key_states,
        )
        self.set_lengths(self.lengths or (self.offset,) * key_states.shape[0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T columns after each row and return views up to the longest row's end.

        Packed rows are `(1, heads, N, head_dim)`; each is as much longer as the widest, what follows its own unwritten.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif (key_states.dtype, value_states.dtype) != (self.keys.dtype, self.values.dtype):
            self._widen(key_states, value_states)
        packed = self.write_index.packed
        batch, new = len(self.lengths), key_states.shape[-2] if packed is None else packed.width
        start = self.length - self.offset
        end = start + new
        if end > self.keys.shape[-2]:
            self._grow(end)
        if packed is None and (batch == 1 or min(self.lengths) == self.length):
            self.keys[:batch, :, start:end] = key_states
            self.values[:batch, :, start:end] = value_states
        else:
            rows, columns = self.write_index(self.lengths, new, self.keys.device)
            columns = columns - self.offset if self.offset else columns
            self.keys[rows, :, columns] = key_states.transpose(1, 2).to(self.keys.dtype)
            self.values[rows, :, columns] = value_states.transpose(1, 2).to(self.values.dtype)
        self.lengths = tuple([length + new for length in self.lengths])
        self.length += new
        return self.keys[:batch, :, :end], self.values[:batch, :, :end]  # (batch, heads, end, head_dim)

    def append(self, lengths: tuple[int, ...], length: int) -> None:
        """Make `lengths`, `length` at most, the rows' lengths; the new columns are written elsewhere."""
        if (end := length - self.offset) > self.keys.shape[-2]:
            self._grow(end)
        self.lengths, self.length = lengths, length

    def _widen(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Hold numbers as wide as new ones: transformers' layers join both by `torch.cat`. Autocast's are narrower."""
        keys, values = self.keys, self.values
        pairs = ((keys, key_states), (values, value_states))
        dtypes = [torch.promote_types(buffer.dtype, new.dtype) for buffer, new in pairs]
        if dtypes == [keys.dtype, values.dtype]:
            return
        self._allocate(keys.shape, values.shape, *(keys.new_empty(0, dtype=dtype) for dtype in dtypes))
        self.keys.copy_(keys)
        self.values.copy_(values)

    def _allocate(
        self, keys: tuple[int, ...], values: tuple[int, ...], like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        """Buffers of zeros of these shapes, with the dtypes of `like_keys` and `like_values`."""
        per_layer = 2 if keys == values and like_keys.dtype == like_values.dtype else 1
        self.keys, block = self.blocks.take(keys, like_keys, per_layer=per_layer)
        self.values, other = self.blocks.take(values, like_values, per_layer=per_layer)
        self.buffers = (block,) if other is block else (block, other)

    def select(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, in this order."""
        index, end = rows.to(self.keys.device), self.length - self.offset
        for buffer in (self.keys[:, :, :end], self.values[:, :, :end]):
            buffer[: len(rows)] = buffer[index]
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

    @property
    def _num_used(self) -> int:
        """Columns that hold something."""
        return self.length - self.offset

    def _grow(self, needed: int, *, rows: int = 0) -> None:
        """Make room for `needed` columns, by half at least, and for `rows`, with those in reserve."""
        capacity, batch = self.keys.shape[-2], len(self.lengths)
        capacity = capacity if needed <= capacity else max(needed, capacity * 3 // 2)
        most, columns = self.row_reserve
        rows = max(rows, batch, min(most, columns // capacity))
        used = self._num_used
        keys, values = self.keys, self.values
        heads_dims = [(old.shape[1], capacity, old.shape[3]) for old in (keys, values)]
        self._allocate((rows, *heads_dims[0]), (rows, *heads_dims[1]), keys, values)
        self.keys[:batch, :, :used] = keys[:batch, :, :used]
        self.values[:batch, :, :used] = values[:batch, :, :used]
