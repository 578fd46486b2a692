"""Recurrences of state layers over a tree of columns, from the state before them.

Each function takes the arguments of transformers' function for several tokens and computes what the function for one
token gives along every path. What a state after a column is made of stays with the layer (`cache/state_layer.py`).

A head's state is a matrix S. Column i has a decay a_i, a key k_i and an update u_i: S_i = a_i S_parent + k_i u_iᵀ.
On a CPU the core computes that, row by row of S, so that all columns' rows stay in the first cache. A column's numbers
are the same bits whatever other columns there are.

Elsewhere S_i = c_i S + Σ_j (c_i / c_j) k_j u_jᵀ over the columns j on its path, c being the product of the decays on a
path: Yang et al., Gated Delta Networks, arXiv:2412.06464, section 3.3, with ancestors in the place of all columns
before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_specdec.cache.state_layer import Columns, KeptColumns, StateLayer
from hf_specdec.common.transfer import is_host
from hf_specdec.compat.state_layers import ACTIVATIONS
from hf_specdec.kernels.core_recurrence import CoreColumns, read_by_core
from hf_specdec.kernels.products import by_vectors

EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """Keys, updates and decays of C columns, of which a state after any of them is made.

    Attributes:
        keys, updates: `(batch, heads, C, head_dim)`.
        log_decay, total: `(batch, heads, C, 1 or key_dim)`: the logarithm of each column's decay, and of the product
            of those on its path.
        key_first (`bool`): whether states are `(batch, heads, key_dim, value_dim)`, or transposed.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    log_decay: torch.Tensor
    total: torch.Tensor
    key_first: bool

    def state_after(self, state: torch.Tensor, kept: KeptColumns) -> torch.Tensor:
        """The state after each row's kept columns."""
        if kept.ends_chain is not None:
            end = kept.ends_chain + 1
            keys, updates, total = self.keys[:, :, :end], self.updates[:, :, :end], self.total[:, :, :end]
            last = total[:, :, -1:]  # (batch, heads, 1, 1 or key_dim)
            decays = (last - total).exp()
        else:
            keys, updates, total = self.keys, self.updates, self.total
            padded = functional.pad(total, (0, 0, 1, 0))  # of the text's last token 0
            places = kept.last_index(total.device)[:, None, None, None].expand(-1, *total.shape[1:2], 1, total.shape[3])
            last = padded.gather(2, places)
            decays = (last - total).masked_fill(~kept.on_path(total.device)[..., None], -torch.inf).exp()
        decayed = keys * decays
        if self.key_first:
            return torch.addcmul(decayed.transpose(-1, -2) @ updates, state, last.exp().transpose(-1, -2))
        return torch.addcmul(updates.transpose(-1, -2) @ decayed, state, last.exp())


def outer_products(
    layer: StateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    key_first: bool = True,
) -> torch.Tensor:
    """Reads the states after the queries' columns, `(batch, Q, heads, value_dim)`.

    Args:
        query, key: `(batch, Q, key_heads, key_dim)`, each of as many heads, one after the other.
        value: `(batch, Q, heads, value_dim)`: the update; or what the state is to hold under the key, with `beta`.
        log_decay: `(batch, Q, heads, 1 or key_dim)`.
        beta: `(batch, Q, heads, 1)`: how far the state moves there (the delta rule).
    """
    columns, state = layer.columns, layer.recurrent_states[0]
    assert columns is not None and state is not None
    if CoreColumns.fits(state, key.shape[-1]):
        return read_by_core(layer, state, query, key, value, log_decay, beta, key_first=key_first)
    query, key = [tensor.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for tensor in (query, key)]
    query, key, value, log_decay = [tensor.transpose(1, 2) for tensor in (query, key, value, log_decay)]
    state = state.to(value.dtype)
    state = state if key_first else state.transpose(-1, -2)
    read: list[torch.Tensor] = []

    def extended(before: OuterProducts | None) -> OuterProducts:
        keys, decays = key, log_decay
        if before is not None:
            keys, decays = torch.cat([before.keys, key], dim=2), torch.cat([before.log_decay, log_decay], dim=2)
        if columns.visible.shape[2] == 1:
            new, total, pairs = log_decay, log_decay, None
        else:
            new = columns.seen(decays.device).to(decays.dtype) @ decays  # (batch, heads, Q, 1 or key_dim)
            total = new if before is None else torch.cat([before.total, new], dim=2)
            pairs = _Pairs(new, total, columns)
        decayed = new.exp()
        updates = value
        if beta is not None:
            moves = beta.transpose(1, 2)
            updates = (value - (key * decayed) @ state) * moves
            if pairs is not None:
                updates = _solved(pairs.products(key, keys) * moves, updates, before)
        all_updates = updates if before is None else torch.cat([before.updates, updates], dim=2)
        output = (query * decayed) @ state
        if pairs is None:
            output = output + (query * key).sum(dim=-1, keepdim=True) * updates
        else:
            output = output + pairs.products(query, keys) @ all_updates
        read.append(output)
        return OuterProducts(keys, all_updates, decays, total, key_first)

    layer.record_columns(extended)
    return read[0].transpose(1, 2)


def _solved(between: torch.Tensor, updates: torch.Tensor, before: OuterProducts | None) -> torch.Tensor:
    """Updates of Q columns, of which each changes what those that see it move; `between` is `(batch, heads, Q, C)`."""
    num_queries = updates.shape[2]
    if before is not None:
        updates = updates - between[..., :-num_queries] @ before.updates
    # Unitriangular: what a column has with itself is taken for 1.
    solved: torch.Tensor = torch.linalg.solve_triangular(
        between[..., -num_queries:], updates, upper=False, unitriangular=True
    )
    return solved


class _Pairs:
    """Decay between each of Q columns and those that it sees of C."""

    def __init__(self, new: torch.Tensor, total: torch.Tensor, columns: Columns) -> None:
        self._by_key, seen = new.shape[-1] > 1, columns.seen(new.device)
        if self._by_key:
            between = new[:, :, :, None] - total[:, :, None]  # (batch, heads, Q, C, key_dim)
            self._decay = between.masked_fill(~seen[..., None], -torch.inf).exp()
        else:
            between = new - total.transpose(-1, -2)  # (batch, heads, Q, C)
            self._decay = between.masked_fill(~seen, -torch.inf).exp()

    def products(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """`(batch, heads, Q, C)`: dot products, as far as decay leaves them."""
        if self._by_key:
            return (left[:, :, :, None] * right[:, :, None] * self._decay).sum(dim=-1)
        return (left @ right.transpose(-1, -2)) * self._decay


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
        query, key = [one / torch.sqrt((one * one).sum(dim=-1, keepdim=True) + EPS) for one in (query, key)]
    query = query * query.shape[-1] ** -0.5
    g = g if g.ndim == 4 else g[..., None]
    output = outer_products(layer, query, key, value, g, beta[..., None])
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
    output = outer_products(layer, C.float(), B.float(), value, log_decay, None, key_first=False)
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
