"""Recurrences of state layers over a tree of columns: each state from its parent's, as for one token.

Each function takes the arguments of transformers' function for several tokens and computes what the function for one
token gives along every path. What a state after a column is made of stays with the layer (`cache/state_layer.py`).

A head's state is a matrix S. Column i has a decay a_i, a key k_i and an update u_i: S_i = a_i S_parent + k_i u_iᵀ.
On a CPU the core computes that, row by row of S, so that all columns' rows stay in the first cache. A column's numbers
are the same bits whatever other columns there are, and whichever row of a batch or thread has it. Elsewhere torch
computes all columns of a depth at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from hf_specdec.cache.state_layer import Columns, KeptColumns, StateLayer
from hf_specdec.common.transfer import is_host, to_device
from hf_specdec.compat.state_layers import ACTIVATIONS
from hf_specdec.kernels import cpu
from hf_specdec.kernels.layers import LANES, PLAIN
from hf_specdec.kernels.products import by_vectors

Array = npt.NDArray[Any]
ROWS = 6  # of a state that the core computes at once, at most
EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True, slots=True)
class StateColumns:
    """Columns of which states are made, each from its parent's, in fp32.

    Attributes:
        query, key: `(batch, C, key_heads, key_dim)`, each of as many heads, one after the other.
        value: `(batch, C, heads, value_dim)`: the update; or what the state is to hold under the key, with `beta`.
        decay: `(batch, C, heads, key_dim)`.
        beta: `(batch, C, heads, 1)`: how far the state moves there (the delta rule).
        key_first (`bool`): whether states are `(batch, heads, key_dim, value_dim)`, or transposed.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    key_first: bool

    def after(self, before: "StateColumns | None") -> "StateColumns":
        """These columns after others."""
        if before is None:
            return self

        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(before, name), getattr(self, name)], dim=1)

        beta = None if self.beta is None else joined("beta")
        return StateColumns(joined("query"), joined("key"), joined("value"), joined("decay"), beta, self.key_first)

    def read(self, state: torch.Tensor, parents: Array) -> torch.Tensor:
        """Read the states after the columns by the queries, `(batch, C, heads, value_dim)`."""
        out = torch.empty_like(self.value)
        if self.is_cores(state):
            self._run(self.laid_out(state), parents, out.data_ptr())
            return out
        for rows, columns, states in self._levels(state, parents):
            query = self._of_heads(self.query)[rows, columns]
            out[rows, columns] = (query[..., None, :] @ states).squeeze(-2)
        return out

    def state_after(self, state: torch.Tensor, kept: KeptColumns) -> torch.Tensor:
        """The state after each row's kept columns, in the place of the one before them where the core computes it."""
        if self.is_cores(state):
            state = self.laid_out(state)
            self._run(state, kept.parents, 0)
            return state
        result = state.clone() if self.key_first else state.mT.clone()
        for rows, _, states in self._levels(state, kept.parents):  # one column of a row, the last one at last
            result[rows] = states.to(result.dtype)
        return result if self.key_first else result.mT.contiguous()

    def is_cores(self, state: torch.Tensor) -> bool:
        """Returns whether the core computes such states."""
        is_plain = type(state) in PLAIN and is_host(state.device) and state.dtype == torch.float32
        return is_plain and self.key.shape[-1] % LANES == 0 and cpu.core is not None and cpu.core.has_kernels()

    def laid_out(self, state: torch.Tensor) -> torch.Tensor:
        """A state whose numbers of one value lie next to each other in memory, as the core moves it on."""
        return state.mT.contiguous().mT if self.key_first else state.contiguous()

    def _run(self, state: torch.Tensor, parents: Array, out: int) -> None:
        (batch, count, heads, value_dim), (*_, key_heads, key_dim) = self.value.shape, self.key.shape
        threads = cpu.threads_for(state.numel() * count) or 1
        room = state.new_empty(threads, (count * ROWS + 1) * key_dim)
        parents = np.ascontiguousarray(parents, dtype=np.int64)
        addresses = [tensor.data_ptr() for tensor in (room, self.query, self.key, self.value, self.decay)]
        cpu.core.recur(
            (state.data_ptr(), out, *addresses, 0 if self.beta is None else self.beta.data_ptr(), parents.ctypes.data),
            (batch, heads, key_heads, count, value_dim, key_dim),
            threads,
            0 if threads == 1 else cpu.team(),
        )

    def _levels(self, state: torch.Tensor, parents: Array) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """N columns of one depth after another: rows, columns, and the states `(N, heads, key_dim, value_dim)`."""
        key, before = self._of_heads(self.key), (state if self.key_first else state.mT).to(self.value.dtype)
        places = np.repeat(np.arange(len(parents))[:, None], parents.shape[1] + 1, axis=1)  # among those, by column + 1
        for level in _levels_of(parents):
            source = places[level[0], parents[level] + 1]
            places[level[0], level[1] + 1] = np.arange(len(source))
            rows, columns, source = to_device([*level, source], state.device)
            decayed = before[source] * self.decay[rows, columns][..., None]
            new, update = key[rows, columns], self.value[rows, columns]
            if self.beta is not None:
                update = (update - (new[..., None, :] @ decayed).squeeze(-2)) * self.beta[rows, columns]
            before = decayed + new[..., None] * update[..., None, :]
            yield rows, columns, before

    def _of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queries or keys `(batch, C, heads, key_dim)`."""
        return tensor.repeat_interleave(self.value.shape[2] // tensor.shape[2], dim=2)


def _levels_of(parents: Array) -> Iterator[tuple[Array, Array]]:
    """Rows and columns of each depth below the state; what has a parent before -1 is passed over."""
    depths, rows = np.full(parents.shape, -1), np.arange(len(parents))
    for column, parent in enumerate(parents.T):
        below = np.where(parent < 0, 0, depths[rows, np.maximum(parent, 0)] + 1)
        depths[:, column] = np.where(parent < -1, -1, below)
    for depth in range(depths.max(initial=-1) + 1):
        yield np.nonzero(depths == depth)  # type: ignore[misc]


def read_states(
    layer: StateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    key_first: bool = True,
) -> torch.Tensor:
    """Reads the states after the queries' columns, `(batch, Q, heads, value_dim)`; arguments as of `StateColumns`.

    Args:
        log_decay: logarithms of decays, of which a head may have one.
    """
    state = layer.recurrent_states[0]
    assert layer.columns is not None and state is not None
    decay = log_decay.exp().expand(*value.shape[:3], key.shape[-1])
    query, key, value, decay = [tensor.contiguous() for tensor in (query, key, value, decay)]
    new = StateColumns(query, key, value, decay, None if beta is None else beta.contiguous(), key_first)
    if key_first and new.is_cores(state):
        layer.recurrent_states[0] = state = new.laid_out(state)
    record: StateColumns = layer.record_columns(new.after)
    return record.read(state, layer.columns.parents)[:, -value.shape[1] :]


def gated_delta_rule(
    layer: StateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:
    """Gated DeltaNet (Qwen3-Next) and Kimi Delta Attention, whose `g` is one of each key's dimension.

    Args:
        query, key: `(batch, Q, key_heads, key_dim)`.
        value: `(batch, Q, heads, value_dim)`.
        g: `(batch, Q, heads)` or `(batch, Q, heads, key_dim)`: logarithms of decays.
        beta: `(batch, Q, heads)`.
    """
    dtype = query.dtype
    query, key, value, beta, g = [tensor.float().contiguous() for tensor in (query, key, value, beta, g)]
    if use_qk_l2norm_in_kernel:
        query, key = [row / torch.sqrt((row * row).sum(dim=-1, keepdim=True) + EPS) for row in (query, key)]
    query = query * query.shape[-1] ** -0.5
    g = g if g.ndim == 4 else g[..., None]
    output = read_states(layer, query, key, value, g, beta[..., None])
    return output.to(dtype).contiguous()


def state_space_duality(
    layer: StateLayer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """Mamba-2, without limits of the time step, as for one token.

    Args:
        hidden_states: `(batch, Q, heads, head_dim)`.
        dt: `(batch, Q, heads)`.
        A, D: `(heads,)`.
        B, C: `(batch, Q, groups, state_size)`: keys and queries.
    """
    steps = _time_steps(dt, dt_bias, dt_softplus)  # (batch, Q, heads)
    states = hidden_states.float()
    value, log_decay = states * steps[..., None], (steps * A.float())[..., None]
    output = read_states(layer, C.float(), B.float(), value, log_decay, None, key_first=False)
    if D is not None:
        output = output + states * D.float()[:, None]
    return output.to(hidden_states.dtype).contiguous()


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """Steps of `(..., channels)`, rounded as transformers rounds them for one token."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return (_rounded_alike(functional.softplus, dt, dt) if softplus else dt).float()


def _rounded_alike(function: Callable[..., torch.Tensor], numbers: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A function of single numbers; each is rounded alike in any forward where the layer's states are halves."""
    return function(numbers) if states.dtype == torch.float32 else by_vectors(function, numbers)


def convolution(
    layer: StateLayer,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """A causal convolution along each path.

    Args:
        hidden_states: `(batch, channels, size + C)`: the state and the columns, of which the last Q are returned.
        weight: `(channels, width)`.
    """
    columns = layer.columns
    assert columns is not None
    num_queries, width = columns.visible.shape[1], weight.shape[-1]
    states = hidden_states.to(weight.dtype)
    exact = torch.promote_types(weight.dtype, torch.float32)
    recent = states[..., -(num_queries + width - 1) :]
    if is_host(states.device) and (columns.is_chain or hidden_states.dtype != exact):  # one order, half of torch's time
        taps = weight.to(exact)
        windows = (
            recent.to(exact).unfold(-1, width, 1) if columns.is_chain else _windows(states, columns, width).to(exact)
        )
        found = windows[..., 0] * taps[:, :1]  # (batch, channels, Q)
        for tap in range(1, width):
            found.addcmul_(windows[..., tap], taps[:, tap : tap + 1])
        found = (found if bias is None else found.add_(bias[:, None])).to(weight.dtype)
    elif columns.is_chain:
        found = functional.conv1d(recent, weight[:, None], bias, groups=len(weight))
    else:
        found = torch.einsum("bcqw,cw->bcq", _windows(states, columns, width), weight)
        found = found if bias is None else found + bias[:, None]
    if activation is not None:
        found = _rounded_alike(ACTIVATIONS[activation], found, hidden_states)
    return found.to(hidden_states.dtype)


def _windows(states: torch.Tensor, columns: Columns, width: int) -> torch.Tensor:
    """The last `width` columns of each query's path, `(batch, channels, Q, width)`."""
    size = states.shape[-1] - columns.visible.shape[2]
    places = columns.windows(size, states.device)[..., -width:]  # (batch, Q, width)
    flat = places.flatten(1)[:, None].expand(-1, states.shape[1], -1)
    return states.gather(2, flat).view(*states.shape[:2], *places.shape[1:])
