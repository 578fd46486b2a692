"""Convolution and recurrent states of one layer: read as transformers' layers read them, or recorded per column.

Between two commits a recorded layer keeps the states before the columns and, of each column, what a state after it is
made of. A commit computes or picks the states after each row's last kept column.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.common.replaced import this_thread
from hf_specdec.common.transfer import to_device
from hf_specdec.compat.caches import LinearAttentionLayer

Array = npt.NDArray[Any]


class _Sent:
    """Windows of one forward that go to each device once."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, torch.device], torch.Tensor] = {}

    def _on(self, device: torch.device, size: int, make: Callable[[], Array]) -> torch.Tensor:
        key = (size, device)
        if key not in self._sent:
            (self._sent[key],) = to_device([make()], device)
        return self._sent[key]


class Columns(_Sent):
    """The columns written since the last commit, C in each row, of which a forward computes the last Q.

    Args:
        visible: `(batch, Q, C)` bool: which columns each of the last Q sees, its own counted.
        before: those of the forward before it, since the same commit.

    Attributes:
        parents: `(batch, C)`: the column before each on its path; -1 for the text's last token.
        is_chain (`bool`): whether each column's parent is the one next to it, in all rows.
    """

    def __init__(self, visible: Array, before: "Columns | None" = None) -> None:
        super().__init__()
        self.visible = visible
        _, num_queries, num_columns = visible.shape
        seen = visible & ~np.eye(num_queries, num_columns, num_columns - num_queries, dtype=np.bool_)
        parents = np.where(seen.any(axis=2), num_columns - 1 - seen[:, :, ::-1].argmax(axis=2), -1)
        self.parents: Array = parents if before is None else np.concatenate([before.parents, parents], axis=1)
        self.is_chain = bool((self.parents == np.arange(num_columns) - 1).all())

    def windows(self, size: int, device: torch.device) -> torch.Tensor:
        """`(batch, Q, size)`: the last columns of each path, from the `size` of the state on that come before all."""
        ends = np.broadcast_to(np.arange(self.parents.shape[1])[-self.visible.shape[1] :], self.visible.shape[:2])
        return self._on(device, size, lambda: self.back_from(ends, size))

    def kept(self, paths: Sequence[Sequence[int]]) -> "KeptColumns":
        """The columns that become part of the text, of each row."""
        on_path = np.zeros(self.parents.shape, dtype=np.bool_)
        last = np.full(len(paths), -1)
        for row, path in enumerate(paths):
            on_path[row, list(path)] = True
            last[row] = path[-1] if path else -1
        return KeptColumns(self, on_path, last)

    def back_from(self, ends: Array, size: int) -> Array:
        """`(..., size)`: the columns that lead to `ends`, `(batch, ...)`; those of the state are the first `size`."""
        rows = np.arange(len(ends)).reshape(-1, *[1] * (ends.ndim - 1))
        places = np.empty((*ends.shape, size), dtype=np.int64)
        for place in reversed(range(size)):
            places[..., place] = size + ends
            ends = np.where(ends < 0, ends - 1, self.parents[rows, ends.clip(min=0)])
        return places


class KeptColumns(_Sent):
    """The columns of each row that become part of its text.

    Attributes:
        last: `(batch,)`: the last of them; -1 where there is none.
        counts (`list[int]`): how many they are.
        ends_chain (`int | None`): the last one of a chain, where it is the same in all rows.
    """

    def __init__(self, columns: Columns, on_path: Array, last: Array) -> None:
        super().__init__()
        self.columns, self._on_path, self.last = columns, on_path, last
        self.counts: list[int] = on_path.sum(axis=1).tolist()
        same = columns.is_chain and last.min() == last.max() >= 0
        self.ends_chain = int(last[0]) if same else None

    @functools.cached_property
    def parents(self) -> Array:
        """`(batch, C)`: as of all columns; -2 for those that are not kept."""
        return np.where(self._on_path, self.columns.parents, -2)

    def windows(self, size: int, device: torch.device) -> torch.Tensor:
        """`(batch, size)`: the columns of a convolution's state, from the `size` of the present one on."""
        return self._on(device, size, lambda: self.columns.back_from(self.last, size))


class Record(Protocol):
    """The parts of the states after each column, as a recurrence leaves them."""

    def state_after(self, state: torch.Tensor, kept: KeptColumns) -> torch.Tensor:
        """The state after each row's kept columns, from the one before them."""


class StateLayer(LinearAttentionLayer):
    """States of one layer without attention, `(batch, ...)`.

    Attributes:
        columns (`Columns | None`): those of the present forward, where it is recorded.
        num_read (`tuple[int, ...]`): tokens that each row's states have read in this call.
    """

    is_compileable = False  # a recorded forward assigns its states

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.columns: Columns | None = None
        self.num_read: tuple[int, ...] = ()
        self.joined: torch.Tensor | None = None  # what the present convolution reads
        self._new: dict[int, torch.Tensor] = {}  # convolution inputs since the last commit, (batch, channels, C)
        self._record: Record | None = None
        self._before: tuple[dict[int, torch.Tensor], Record | None] = ({}, None)  # the present forward

    @classmethod
    def of(cls, layer: LinearAttentionLayer, **kwargs: Any) -> "StateLayer":
        """A layer with copies of the states of another."""
        made = cls(number_of_states=layer.number_of_states, **kwargs)
        _copy_states(layer, made)
        return made

    def give_back(self, layer: LinearAttentionLayer) -> None:
        """Let a layer of transformers have copies of the states."""
        _copy_states(self, layer)

    def states_of(self, row: int) -> "StateLayer":
        """A layer with copies of one row's states."""
        of_row = StateLayer(self.number_of_states)
        _copy_states(self, of_row, slice(row, row + 1))
        of_row.num_read = self.num_read[row : row + 1]
        return of_row

    def load_states(self, layer: "StateLayer") -> None:
        """Go on from copies of the states of another."""
        _copy_states(layer, self)
        self.num_read = layer.num_read

    def record(self, columns: Columns) -> None:
        """Record the next forward, of these columns."""
        self.columns, self._before = columns, (self._new, self._record)
        self.restart()

    def restart(self) -> None:
        """Forget what the present forward has recorded, to compute it again."""
        new, self._record = self._before
        self._new = dict(new)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """The state's columns and those written since the last commit, `(batch, channels, size + C)`."""
        if self.columns is None:
            if state_idx == 0:
                self._count([conv_states.shape[-1]] * len(conv_states))
            full: torch.Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
            return full
        if (recorder := this_thread.recorder) is None:
            return self.join(conv_states, state_idx)
        with recorder.paused():
            joined = self.join(conv_states, state_idx)
        recorder.states(self, StateLayer.join, (conv_states, state_idx), {}, joined)
        return joined

    def join(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """Add a convolution's inputs of new columns, `(batch, channels, Q)`, to the state and those before them."""
        new = self._new.get(index)
        self._new[index] = inputs if new is None else torch.cat([new, inputs], dim=-1)
        state = self.conv_states[index]
        assert state is not None
        self.joined = torch.cat([state, self._new[index]], dim=-1)
        return self.joined

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep a new state, unless the forward is recorded."""
        if self.columns is not None:
            return recurrent_states
        kept: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return kept

    def record_columns(self, make: Callable[[Any], Record]) -> Any:
        """Add what the recurrence leaves of the new columns: `make(what earlier forwards have left)`."""
        self._record = make(self._record)
        return self._record

    def commit(self, kept: KeptColumns) -> None:
        """Make the states those after the kept columns."""
        self._count(kept.counts)
        for index, new in self._new.items():
            state = self.conv_states[index]
            assert state is not None
            size = state.shape[-1]
            full = torch.cat([state, new], dim=-1)  # (batch, channels, size + C)
            if kept.ends_chain is not None:
                state = full[..., kept.ends_chain + 1 : kept.ends_chain + 1 + size].contiguous()
            else:
                places = kept.windows(size, full.device)[:, None].expand(-1, full.shape[1], -1)
                state = full.gather(2, places)
            self.conv_states[index] = state
        if self._record is not None:
            state = self.recurrent_states[0]
            assert state is not None
            self.recurrent_states[0] = self._record.state_after(state, kept).to(state.dtype)
        self.forget()

    def _count(self, counts: Sequence[int]) -> None:
        """Count tokens of each row that the states have read."""
        before = self.num_read or (0,) * len(counts)  # empty after one token more of a caller's text: read in place
        self.num_read = tuple([length + count for length, count in zip(before, counts, strict=True)])

    def forget(self) -> None:
        """Forget the columns written since the last commit, and record no more."""
        self.columns = self.joined = None
        self._new, self._record = {}, None

    def select_states(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, in this order."""
        self.num_read = tuple([self.num_read[row] for row in rows.tolist()])
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[rows.to(state.device)]

    def admit_states(self, other: "StateLayer", row: int | None) -> None:
        """Take over the one row of `other`, in the place of row `row`, or after the last row."""
        at = len(self.num_read) if row is None else row
        self.num_read = (*self.num_read[:at], *other.num_read, *self.num_read[at + 1 :])
        for states, new in ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)):
            for index, state in states.items():
                if state is not None:
                    states[index] = torch.cat([state[:at], new[index], state[at + 1 :]])


class StateAttentionLayer(StateLayer, SpecLayer):
    """Keys and values, and the states of a layer that attends and has states (Falcon-H1)."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        SpecLayer.__init__(self, **kwargs)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values, given by place, or states, given by name."""
        (SpecLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


def _copy_states(source: LinearAttentionLayer, target: LinearAttentionLayer, rows: slice = slice(None)) -> None:
    for name in ("conv_states", "recurrent_states"):
        states = getattr(source, name)
        copies = {index: None if state is None else state[rows].clone() for index, state in states.items()}
        setattr(target, name, copies)
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
        setattr(target, name, dict(getattr(source, name)))
    target.conv_kernel_size = dict(source.conv_kernel_size)
    if target.device is None:
        target.device, target.dtype = source.device, source.dtype
