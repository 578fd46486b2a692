"""Key/value buffers that never change shape, for `StaticCache`: what a compiled forward needs to be compiled once.

The prompt is written as into any `SpecCache`. From then on every forward has the same number of columns: `place` puts
their places into tensors before the forward, which writes there and attends to the whole buffers; the mask hides what
is not text. No Python number that a forward reads changes between steps. Knows nothing about trees, models or tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack
from transformers import StaticCache, StaticLayer, StaticSlidingWindowLayer

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import Blocks, SpecLayer
from hf_specdec.common.transfer import upload
from hf_specdec.compat.caches import VALUES_KEEP_DTYPE, DummyLayer
from hf_specdec.compat.devices import mark_dynamic, mark_static_address


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """The shapes of a call over a static cache.

    Attributes:
        widths (`tuple[int, ...]`): tokens of each row in a forward after the prompt, ascending: each forward has the
            least of them that holds what it computes.
        capacity (`int`): columns of the key/value buffers.
        flat_tokens (`int`): tokens of all rows that a forward computes in about the time of one.
        is_undisturbed: whether no code of the caller's runs in and between the forwards, which might change the model.
    """

    widths: tuple[int, ...]
    capacity: int
    flat_tokens: int = 0
    is_undisturbed: bool = False

    def width_of(self, num_columns: int) -> int:
        """The least width that holds so many columns; as many as these where none does."""
        return next((width for width in self.widths if width >= num_columns), num_columns)


class StaticWriteIndex:
    """Write positions of the next forward, in tensors with fixed addresses.

    Attributes:
        rows, columns (`Tensor`): `(batch, 1)` and `(batch, width)`.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.rows = self.columns = torch.arange(batch, device=device)[:, None]
        self._columns: dict[int, torch.Tensor] = {}  # by width
        mark_static_address(self.rows)

    @property
    def is_inference(self) -> bool:
        """Returns whether one of them was made in inference mode."""
        return any(columns.is_inference() for columns in self._columns.values())

    @property
    def length(self) -> torch.Tensor:
        """A scalar, tokens of the longest row."""
        return self.columns[:, 0].max()

    def set(self, columns: torch.Tensor) -> None:
        """Take the next positions, `columns` being `(batch, width)` on the host."""
        width, device = columns.shape[1], self.rows.device
        if width in self._columns:
            upload(columns, device, self._columns[width])
        else:
            self._columns[width] = columns.to(device, copy=True)
            mark_static_address(self._columns[width])
            if width > 1:
                mark_dynamic(self._columns[width], 1)
        self.columns = self._columns[width]


class StaticSpecLayer(SpecLayer):
    """A `SpecLayer` whose forwards write where `static_index` says, once there is one, and return the whole buffers.

    A sliding layer has a column for every token too; those that an adopted window no longer had are zeros.
    """

    static_index: StaticWriteIndex | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the forward's columns where the index says; the lengths stay until `set_lengths` is called."""
        index = self.static_index
        if index is None:
            if self.is_initialized and not any(self.lengths) and not self._fits(key_states, value_states):
                self.lazy_initialization(key_states, value_states)  # the model has been moved since, or autocast ended
            return super().update(key_states, value_states)
        self.keys[index.rows, :, index.columns] = key_states.transpose(1, 2).to(self.keys.dtype)  # of autocast's dtype
        self.values[index.rows, :, index.columns] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys, self.values

    def _fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Returns whether `lazy_initialization` would make buffers of the same heads and dtypes on the same device."""
        dtypes = (key_states.dtype, (value_states if VALUES_KEEP_DTYPE else key_states).dtype)
        buffers = zip((self.keys, self.values), (key_states, value_states), dtypes, strict=True)
        return all(
            (buffer.dtype, buffer.device, buffer.shape[1::2])
            == (dtype, new.device, new.shape[1::2])  # heads and head_dim
            for buffer, new, dtype in buffers
        )

    def load(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Start from existing columns that end at token `length`; each stands at its token's place."""
        self.lazy_initialization(keys, values)
        if length > self.keys.shape[-2]:
            self._grow(length)
        first = length - keys.shape[-2]
        self.keys[:, :, first:length] = keys
        self.values[:, :, first:length] = values
        self.set_lengths((length,) * keys.shape[0])

    def set_index(self, index: StaticWriteIndex, capacity: int) -> None:
        """Write where `index` says from now on, into buffers of at least `capacity` columns."""
        keys = self.keys
        self.make_room(capacity)
        if index is not self.static_index or self.keys is not keys:
            self.static_index = index
            self.keys, self.values = _apart(self.keys), _apart(self.values)
            mark_static_address(self.keys)
            mark_static_address(self.values)

    def select(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, in this order, in buffers for as many."""
        super().select(rows)
        keys, values = self.keys[: len(rows)], self.values[: len(rows)]
        self._allocate(tuple(keys.shape), tuple(values.shape), keys, values)
        self.keys.copy_(keys)
        self.values.copy_(values)

    def empty(self) -> None:
        """Forget everything; the buffers stay where they are."""
        self.clear_index()
        self.set_lengths((0,) * len(self.lengths))

    def clear_index(self) -> None:
        """Write after each row's text from now on."""
        self.static_index = None

    @property
    def _num_used(self) -> int:
        """Columns that hold something: with a static index, more than the lengths say."""
        return super()._num_used if self.static_index is None else int(self.keys.shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole buffer, once its shape is fixed."""
        if self.static_index is None:
            return super().get_mask_sizes(query_length)
        return self.keys.shape[-2], 0

    def get_seq_length(self) -> Any:
        """Tokens of the longest row: a tensor once shapes are fixed, so that no compiled forward depends on it."""
        return self.length if self.static_index is None else self.static_index.length


def _apart(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage holds nothing else; a view where DLPack does not know the device."""
    # of views of one block torch's compiler keeps a symbol for each one's place, and compares all pairs for overlap
    if buffer.untyped_storage().nbytes() == buffer.nbytes:
        return buffer
    try:
        # DLPack takes tensors of the current device alone.
        with torch.cuda.device_of(buffer):  # type: ignore[no-untyped-call]
            return from_dlpack(buffer)
    except (RuntimeError, ValueError, BufferError):
        return buffer


class StaticSpecCache(SpecCache):
    """One `StaticSpecLayer` per attention layer."""

    def __init__(self, layers: list[Any], *, reserve: int) -> None:
        super().__init__(layers, reserve=reserve)
        self._indices: dict[torch.device, StaticWriteIndex] = {}
        self._kept_blocks: list[tuple[torch.Tensor, int]] = []
        self._room = self._capacity = 0  # columns that all layers have and most, where each writes as its index says

    @property
    def is_compileable(self) -> bool:
        """True if transformers makes a forward's mask beforehand, as over its static caches: the prompt's, no other."""
        return not self.lengths

    @classmethod
    def of(cls, cache: StaticCache, *, capacity: int) -> "StaticSpecCache | None":
        """A cache with the same content and structure, or `None` where a layer is not plain attention.

        Args:
            cache: empty or not; it is left as it is.
            capacity (`int`): columns of every buffer.
        """
        layers: list[Any] = []
        blocks = Blocks(max(len(cache.layers), 1))
        for layer in cache.layers:
            if type(layer) is DummyLayer:
                layers.append(layer)
                continue
            if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
                return None
            spec = StaticSpecLayer(reserve=capacity, is_sliding=bool(layer.is_sliding), blocks=blocks)
            length = int(layer.get_seq_length())
            if length:
                kept = min(length, layer.max_cache_len)
                spec.load(layer.keys[:, :, :kept], layer.values[:, :, :kept], length)
            layers.append(spec)
        return cls(layers, reserve=capacity)

    def has_layers_of(self, cache: StaticCache) -> bool:
        """True if it has the layers that `of` would make: the model was not given others since this one was made."""
        kinds = [layer.is_sliding if isinstance(layer, StaticSpecLayer) else None for layer in self.layers]
        return kinds == [None if type(layer) is DummyLayer else bool(layer.is_sliding) for layer in cache.layers]

    def empty(self) -> None:
        """Forget everything, for another text: zeros in the same buffers, and the same places to write."""
        for block in {id(block): block for layer in self._static_layers for block in layer.buffers}.values():
            block.zero_()  # what a mask hides has to be finite
        for layer in self._static_layers:
            layer.empty()
        self.lengths = ()
        self._forget_room()

    @property
    def _static_layers(self) -> list[StaticSpecLayer]:
        """Those that have been written."""
        return [layer for layer in self._written if isinstance(layer, StaticSpecLayer)]

    @property
    def capacity(self) -> int:
        """Columns of the buffers; the prompt has been read."""
        return self._capacity or max((int(layer.keys.shape[-2]) for layer in self._written), default=0)

    @property
    def is_inference(self) -> bool:
        """Returns whether the buffers were made in inference mode, outside of which no one may write to them."""
        is_written = any(layer.keys.is_inference() for layer in self._written)
        return is_written or any(index.is_inference for index in self._indices.values())

    def place(self, width: int, *, written: int = 0) -> None:
        """Set where the next forward writes its `width` columns: after each row's text and `written` columns more.

        Shapes follow from `width` alone unless the buffers are too small.
        """
        columns = torch.from_numpy(
            np.array(self.lengths)[:, None] + np.arange(written, written + width)
        )  # (batch, width)
        first = max(self.lengths) + written
        if first + width > self._room:
            layers = self._static_layers
            for device in {layer.keys.device for layer in layers} - self._indices.keys():
                self._indices[device] = StaticWriteIndex(len(self.lengths), device)
            for layer in layers:
                layer.set_index(self._indices[layer.keys.device], first + width)
            capacities = [int(layer.keys.shape[-2]) for layer in layers]
            self._room, self._capacity, self._kept_blocks = min(capacities), max(capacities), super()._blocks()
        for index in self._indices.values():
            index.set(columns)

    def _blocks(self) -> list[tuple[torch.Tensor, int]]:
        return self._kept_blocks if self._room else super()._blocks()

    def unplace(self) -> None:
        """Let forwards of any width write after each row's text, as before `place`; nothing is uncommitted."""
        self._forget_room()
        for layer in self._static_layers:
            layer.clear_index()

    def _forget_room(self) -> None:
        self._room, self._capacity, self._kept_blocks = 0, 0, []

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order, in buffers for as many."""
        super().select(rows)
        self.unplace()
        self._indices = {}
