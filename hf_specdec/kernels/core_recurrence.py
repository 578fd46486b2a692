"""Recurrences of state layers over a tree by the compiled core: each state from its parent's, as for one token.

A number of a column is the same bits whatever other columns there are, and whichever row of a batch or thread has it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.state_layer import KeptColumns, StateLayer
from hf_specdec.common.transfer import is_host
from hf_specdec.kernels import cpu
from hf_specdec.kernels.layers import LANES, PLAIN

ROWS = 6  # of a state that the core computes at once, at most


@dataclass(frozen=True, slots=True)
class CoreColumns:
    """Columns whose states the core computes, each from its parent's, in fp32.

    Attributes:
        query, key: `(batch, C, key_heads, key_dim)`, each of as many heads, one after the other.
        value: `(batch, C, heads, value_dim)`: the update; or what the state is to hold under the key, with `beta`.
        decay: `(batch, C, heads, key_dim)`.
        beta: `(batch, C, heads, 1)`.
        key_first (`bool`): whether states are `(batch, heads, key_dim, value_dim)`, or transposed.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    key_first: bool

    @staticmethod
    def fits(state: torch.Tensor, key_dim: int) -> bool:
        """Returns whether the core computes such states."""
        is_plain = type(state) in PLAIN and is_host(state.device) and state.dtype == torch.float32
        return is_plain and key_dim % LANES == 0 and cpu.core is not None and cpu.core.has_kernels()

    def after(self, before: "CoreColumns | None") -> "CoreColumns":
        """These columns after others."""
        if before is None:
            return self

        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(before, name), getattr(self, name)], dim=1)

        beta = None if self.beta is None else joined("beta")
        return CoreColumns(joined("query"), joined("key"), joined("value"), joined("decay"), beta, self.key_first)

    def read(self, state: torch.Tensor, parents: npt.NDArray[Any]) -> torch.Tensor:
        """Read the states after the columns by the queries, `(batch, C, heads, value_dim)`."""
        out = torch.empty_like(self.value)
        self._run(self.laid_out(state), parents, out.data_ptr())
        return out

    def laid_out(self, state: torch.Tensor) -> torch.Tensor:
        """A state whose numbers of one value lie next to each other in memory, as the core moves it on."""
        return state.mT.contiguous().mT if self.key_first else state.contiguous()

    def state_after(self, state: torch.Tensor, kept: KeptColumns) -> torch.Tensor:
        """The state after each row's kept columns, in the place of the one before them."""
        state = self.laid_out(state)
        self._run(state, kept.parents, 0)
        return state

    def _run(self, state: torch.Tensor, parents: npt.NDArray[Any], out: int) -> None:
        (batch, count, heads, value_dim), (*_, key_heads, key_dim) = self.value.shape, self.key.shape
        threads = cpu.threads_for(state.numel() * count) or 1
        rows = state.new_empty(threads, (count * ROWS + 1) * key_dim)
        parents = np.ascontiguousarray(parents, dtype=np.int64)
        given = [one.data_ptr() for one in (rows, self.query, self.key, self.value, self.decay)]
        cpu.core.recur(
            (state.data_ptr(), out, *given, 0 if self.beta is None else self.beta.data_ptr(), parents.ctypes.data),
            (batch, heads, key_heads, count, value_dim, key_dim),
            threads,
            0 if threads == 1 else cpu.team(),
        )


def read_by_core(
    layer: StateLayer,
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    key_first: bool,
) -> torch.Tensor:
    """Reads the states after the queries' columns, `(batch, Q, heads, value_dim)`; arguments as of `CoreColumns`.

    Args:
        log_decay: logarithms of decays, of which a head may have one.
    """
    assert layer.columns is not None
    decay = log_decay.exp().expand(*value.shape[:3], key.shape[-1])
    query, key, value, decay = [one.contiguous() for one in (query, key, value, decay)]
    new = CoreColumns(query, key, value, decay, None if beta is None else beta.contiguous(), key_first)
    if key_first:
        layer.recurrent_states[0] = state = new.laid_out(state)
    record: CoreColumns = layer.record_columns(new.after)
    return record.read(state, layer.columns.parents)[:, -value.shape[1] :]
