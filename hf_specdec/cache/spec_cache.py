"""The key/value cache of speculative decoding: preallocated, with a length per row, rolled back for free."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache, DynamicCache, DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from hf_specdec.cache.prefix_cache import KeysValues, Prefix, States
from hf_specdec.cache.spec_layer import Blocks, SpecLayer, WriteIndex
from hf_specdec.cache.state_layer import Columns, StateAttentionLayer, StateLayer
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import this_thread
from hf_specdec.common.transfer import HOST, upload
from hf_specdec.compat.caches import (
    ATTENTION_LAYERS,
    STATE_ATTENTION_LAYERS,
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)


class SpecCache(Cache):
    """One `SpecLayer` or `StateLayer` per layer; layers that share another's keys stay the model's own dummies.

    Attributes:
        state_layer (`StateLayer | None`): the layer whose states the model has asked for last, in a recorded forward.
        lengths (`tuple[int, ...]`): tokens of each row that are committed; empty before the first forward.
        dtype (`torch.dtype | None`): of the keys; `None` before the first forward, or where layers differ.
    """

    max_cache_len = -1  # no bound; PEFT asks caches that are not transformers' dynamic ones

    def __init__(self, layers: list[Any] | None = None, *, reserve: int = 0) -> None:
        super().__init__(layers=layers or [])
        self.reserve = reserve
        self._write_index = WriteIndex()
        for layer in self.layers:
            if isinstance(layer, SpecLayer):
                layer.write_index = self._write_index
        self.lengths: tuple[int, ...] = ()
        self.state_layer: StateLayer | None = None
        self._written: list[SpecLayer] = []
        self.places = (torch.empty(0), torch.empty(0))  # rows and columns of the tokens that were appended last
        self._columns: Columns | None = None
        self.sync()

    @staticmethod
    def takes(cache: Cache, *, records: bool = False) -> bool:
        """Returns whether `adopt` can take over a cache. A subclass may hold more than its layers show."""
        recorded = (LinearAttentionLayer, *STATE_ATTENTION_LAYERS) if records else ()
        types = (DummyLayer, *ATTENTION_LAYERS, *recorded)
        return (
            type(cache) is DynamicCache and not cache.offloading and all(type(layer) in types for layer in cache.layers)
        )

    @classmethod
    def adopt(
        cls, cache: Cache, *, reserve: int = 0, left_out: Sequence[int] = (), records: bool = False
    ) -> "SpecCache | None":
        """A cache with the same content and structure, or `None` where a layer is not plain attention.

        Args:
            cache: a `DynamicCache`, empty or not; it is left as it is.
            reserve (`int`): tokens to allocate room for at once.
            left_out: layers that stay the cache's own, since they hold nothing of the text.
            records: whether forwards are recorded where layers have states.
        """
        if not cls.takes(cache, records=records):
            return None
        layers: list[Any] = []
        blocks = Blocks(max(len(cache.layers), 1))
        for place, layer in enumerate(cache.layers):
            if type(layer) is DummyLayer or place in left_out:
                layers.append(layer)
                continue
            if type(layer) is LinearAttentionLayer:
                layers.append(StateLayer.of(layer))
                continue
            settings: dict[str, Any] = {
                "reserve": reserve,
                "is_sliding": isinstance(layer, DynamicSlidingWindowLayer),
                "blocks": blocks,
            }
            has_states = type(layer) in STATE_ATTENTION_LAYERS
            spec = StateAttentionLayer.of(layer, **settings) if has_states else SpecLayer(**settings)
            if layer.is_initialized and (length := int(layer.get_seq_length())):
                spec.load(layer.keys, layer.values, length)
            layers.append(spec)
        return cls(layers, reserve=reserve)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new columns; layers come into being as the model names them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SpecLayer(reserve=self.reserve, write_index=self._write_index))
        if (open_recorder := this_thread.recorder) is None:
            keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
            return keys, values
        with open_recorder.paused():
            keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        open_recorder.update(layer_idx, (key_states, value_states), (keys, values))
        return keys, values

    @property
    def written_lengths(self) -> tuple[int, ...]:
        """Columns of each row, those that are not committed too: committed ones where no layer has keys.

        Empty before the first forward.
        """
        layers = [layer for layer in self.layers if isinstance(layer, SpecLayer)]
        return next((layer.lengths for layer in layers if layer.is_initialized), () if layers else self.lengths)

    def append(self, layers: Sequence[int], tokens: int, packed: PackedRows | None) -> None:
        """Have columns of `layers` for the tokens of a forward that writes them itself, where `places` says.

        Args:
            tokens: of each row; of all rows where they are packed.
        """
        if not layers:
            return
        first = self.layers[layers[0]]
        lengths, new = first.lengths, tokens if packed is None else packed.width
        longer, longest = tuple([length + new for length in lengths]), first.length + new
        for number in layers:
            self.layers[number].append(longer, longest)
        with self.packing(packed):
            rows, columns = self._write_index(lengths, new, first.device)
        self.places = torch.broadcast_to(rows, columns.shape).contiguous(), columns.contiguous()

    def cut(self, lengths: tuple[int, ...]) -> None:
        """Forget the columns after these lengths, those of the present forward."""
        for layer in self.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.set_lengths(lengths)
            if isinstance(layer, StateLayer) and layer.columns is not None:
                layer.restart()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A convolution's state; `None` in a recorded forward: `update_conv_state` returns it with the columns."""
        return self._state(layer_idx, super().get_conv_state(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrence's state; `None` in a recorded forward, whose recurrences read it of the layer."""
        return self._state(layer_idx, super().get_recurrent_state(layer_idx, state_idx))

    def _state(self, layer_idx: int, state: torch.Tensor | None) -> torch.Tensor | None:
        self.state_layer = self.layers[layer_idx] if self._columns is not None else None
        return state if self.state_layer is None else None

    @property
    def states(self) -> list[StateLayer]:
        """The layers with states."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def record(self, columns: Columns) -> None:
        """Record the next forward's states, of these columns."""
        self._columns = columns
        for layer in self.states:
            layer.record(columns)

    @contextlib.contextmanager
    def packing(self, packed: PackedRows | None) -> Iterator[None]:
        """Inside, a forward's rows come packed; a draft over this cache writes them as ever."""
        self._write_index.packed = packed
        try:
            yield
        finally:
            self._write_index.packed = None

    def sync(self) -> None:
        """Take over whatever the forwards since the last commit have written."""
        self._written = [layer for layer in self.layers if isinstance(layer, SpecLayer) and layer.is_initialized]
        if self._written:
            self.lengths = self._written[0].lengths
        else:
            self.lengths = next((layer.num_read for layer in self.states), ())
        dtypes = {layer.keys.dtype for layer in self._written}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the columns written since the last commit, those in `paths`: a row's column numbers, ascending."""
        written = self._written
        if self._columns is not None:
            kept, self._columns = self._columns.kept(paths), None
            for states in self.states:
                states.commit(kept)
        starts = self.lengths
        self.lengths = tuple([length + len(path) for length, path in zip(starts, paths, strict=True)])
        moves = [
            (row, start + column, start + place)
            for row, (start, path) in enumerate(zip(starts, paths, strict=True))
            for place, column in enumerate(path)
            if place != column
        ]
        if moves:
            self._move(np.array(moves))
        elif written and written[0].lengths == self.lengths:
            return  # every column is kept where it is
        for layer in written:
            layer.set_lengths(self.lengths)

    def _move(self, moves: npt.NDArray[np.int64]) -> None:
        """Move columns in all layers, those of a block at once: `(M, 3)`, row, column and its new place in the text."""
        indices: dict[tuple[torch.device, int], tuple[torch.Tensor, ...]] = {}
        for block, offset in self._blocks():
            where = (block.device, offset)
            if where not in indices:
                places = torch.from_numpy(moves - [0, offset, offset])
                indices[where] = upload(places, block.device).unbind(dim=1)
            rows, source, target = indices[where]
            block[:, rows, :, target] = block[:, rows, :, source]  # (M, buffers, heads, head_dim)

    def _blocks(self) -> list[tuple[torch.Tensor, int]]:
        """The layers' buffers by blocks, each with the offset of its columns."""
        blocks = {(id(block), layer.offset): block for layer in self._written for block in layer.buffers}
        return [(block, offset) for (_, offset), block in blocks.items()]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order; nothing may be uncommitted."""
        index = torch.tensor(rows, device=HOST)
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.select_states(index)
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.select(index)
            elif type(layer) is DynamicLayer and layer.is_initialized:  # left out
                layer.batch_select_indices(index.to(layer.keys.device))
        self.sync()

    def reserve_rows(self, rows: int, columns: int) -> None:
        """Allocate for `rows` rows at once when a second one is admitted, with rows x capacity at most `columns`."""
        for layer in self.layers:
            if isinstance(layer, SpecLayer):
                layer.row_reserve = rows, columns

    def admit(self, other: "SpecCache", row: int | None = None) -> None:
        """Take over the one row of `other`, in the place of `row` or after the last; nothing may be uncommitted."""
        for layer, new in zip(self.layers, other.layers, strict=True):
            if isinstance(layer, StateLayer):
                layer.admit_states(new, row)
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.admit(new, row)
        self.sync()

    def load(self, prefix: Prefix) -> None:
        """Start, empty as it is, with the columns and states of one row."""
        blocks = Blocks(max(len(self.layers), len(prefix.columns), 1))
        while len(self.layers) <= max(prefix.columns, default=-1):
            self.layers.append(SpecLayer(reserve=self.reserve, write_index=self._write_index, blocks=blocks))
        for place, (keys, values) in prefix.columns.items():
            self.layers[place].load(keys, values, prefix.length)
        for place, states in prefix.states.items():
            self.layers[place].load_states(states)
        self.sync()

    def columns_of(self, row: int, start: int, end: int) -> KeysValues:
        """Copies of a row's columns from `start` to `end`, by layer."""
        return {
            place: (layer.keys[row : row + 1, :, start:end].clone(), layer.values[row : row + 1, :, start:end].clone())
            for place, layer in enumerate(self.layers)
            if isinstance(layer, SpecLayer) and layer.is_initialized
        }

    def states_of(self, row: int) -> States:
        """Copies of a row's states, by layer; nothing may be uncommitted."""
        layers = enumerate(self.layers)
        return {place: layer.states_of(row) for place, layer in layers if isinstance(layer, StateLayer)}

    def rollback(self) -> None:
        """Forget a forward that did not finish, on whichever layers it has written."""
        self._columns = None
        for states in self.states:
            states.forget()
        for layer in self.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.set_lengths(self.lengths or (0,) * len(layer.lengths))

    def clear_ahead(self, num_columns: int) -> None:
        """Write zeros over so many columns after each row's text: attention may multiply hidden ones by 0."""
        for layer in self._written:
            for row, length in enumerate(self.lengths):
                start = length - layer.offset
                layer.keys[row, :, start : start + num_columns] = 0  # (heads, columns, head_dim)
                layer.values[row, :, start : start + num_columns] = 0

    def export(self, cache: Cache) -> None:
        """Put the text's columns where plain generation would have left them, as far as all rows have them."""
        while len(cache.layers) < len(self.layers):
            cache.layers.append(DynamicLayer())
        for spec, layer in zip(self.layers, cache.layers, strict=True):
            if isinstance(spec, StateLayer):
                spec.give_back(layer)
            if not isinstance(spec, SpecLayer) or not spec.is_initialized:
                continue
            keys, values = spec.content()
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            if isinstance(layer, StaticLayer):
                _fill(layer, keys, values)
                continue
            if isinstance(layer, DynamicSlidingWindowLayer):
                window = slice(max(keys.shape[-2] - layer.sliding_window + 1, 0), None)
                keys, values = keys[:, :, window], values[:, :, window]
                layer.cumulative_length = min(spec.lengths)
            layer.keys, layer.values = keys.clone(), values.clone()


def _fill(layer: StaticLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write a text's columns into a static layer's buffers, the last ones where it has a window."""
    length = keys.shape[-2]
    kept = min(length, layer.max_cache_len)
    layer.keys[:, :, :kept] = keys[:, :, length - kept :]
    layer.values[:, :, :kept] = values[:, :, length - kept :]
    layer.cumulative_length.fill_(kept)  # in a sliding layer it stops where the window is full
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = length
