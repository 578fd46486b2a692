"""Attention of a few queries by the compiled core, and by torch over grouped heads without copies of keys and values.

A form of a mask that kernels need is kept on the mask, as all layers of a forward share one: it lives as long as the
mask tensor and is forgotten when the mask is changed in place.

Under a mask transformers copies each key/value head once for every query head of its group: for some nodes over a long
text that takes several times as long as their attention. In compiled forwards it does so for one token too. Here the
group's queries are folded into the query length instead. Every row of the result is computed from the same numbers;
sums may be rounded in another order.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import Recorder
from hf_specdec.common.transfer import HOST, is_host
from hf_specdec.compat.attention import version_of
from hf_specdec.kernels import cpu

ATTRIBUTE = "_hf_specdec_notes"
MOST_QUERIES = 128  # of a row in fp32
BLOCK = 128  # queries of a prompt at once
SPAN = 1024  # tokens in whose multiples masks of blocks are kept
LANES = 8  # that sizes of heads are a multiple of


@dataclass(slots=True)
class _Notes:
    """Notes on a mask as it was at `version`."""

    version: int
    made: dict[Hashable, torch.Tensor] = field(default_factory=dict)


def prepared(mask: torch.Tensor, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Result of `make`, kept on the mask; made anew where a change of the mask could not be seen."""
    notes = _notes_of(mask)
    if notes is None:
        return make()
    if key not in notes.made:
        notes.made[key] = make()
    return notes.made[key]


def additive(mask: torch.Tensor, dtype: torch.dtype, lowest: float | None = None) -> torch.Tensor:
    """A mask to be added to the scores, from one that is added already or from one of booleans (`True` is seen).

    Args:
        lowest (`float`, *optional*, defaults to the least finite number of `dtype`): what hides a key.
    """
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
    return mask.clamp(min=lowest).to(dtype)


def _notes_of(mask: torch.Tensor) -> _Notes | None:
    """The mask's notes, new ones if it has changed; `None` where they cannot be kept."""
    if torch.compiler.is_compiling() or (version := version_of(mask)) is None:
        return None
    notes: _Notes | None = getattr(mask, ATTRIBUTE, None)
    if notes is None or notes.version != version:
        notes = _Notes(version)
        setattr(mask, ATTRIBUTE, notes)
    return notes


def can_fold(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Returns whether transformers would copy keys and values.

    Being traced, it asks nothing about the number of queries, which one graph leaves open.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    if groups == 1 or query.shape[1] != groups * key.shape[1] or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    if torch.is_grad_enabled() and query.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    return is_host(query.device) and query.shape[2] > 1 and fits(query, key, value, mask)


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """True if a folded mask takes no more room than the copies of keys and values that folding saves.

    The mask grows with the number of queries: beyond some hundreds, a padded prompt's, copying is the smaller evil.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    if mask.dim() != 4 or mask.shape[-2:] != (num_queries, key.shape[2]):
        return False
    groups = num_heads // key.shape[1]
    copies = batch * num_heads * (head_dim + value.shape[-1])
    rows = mask.shape[0] * num_queries * (groups if mask.shape[1] == 1 else num_heads)
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, num_heads) and rows <= copies


def folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys: `(B, M, Hq, Dv)`."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    folded_mask = prepared(mask, ("grouped", groups, query.dtype), lambda: _folded_mask(mask, groups, query.dtype))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, num_kv_heads, groups * num_queries, head_dim),
        key,
        value,
        attn_mask=folded_mask,
        scale=scaling,
    )
    return attended.reshape(batch, num_heads, num_queries, -1).transpose(1, 2).contiguous()


def _folded_mask(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask `(B, 1, M, K)` for the folded queries, `(B, 1, g*M, K)`: of numbers, which torch makes of booleans anew
    in every layer.
    """
    numbers = additive(mask, dtype, -torch.inf) if mask.dtype == torch.bool else mask
    return numbers.repeat(1, 1, groups, 1)


class CoreAttention:
    """One call of an attention function.

    Args:
        query: `(B, Hq, M, D)`; key, value: `(B, Hkv, K, D)` and `(B, Hkv, K, Dv)`; rows without gaps.
        mask: `(B or 1, 1, M, K)`, of booleans or additive; `None` hides nothing.
        scaling: of the scores; `None` for `D ** -0.5`.
        packed: where the queries, `(1, Hq, N, D)`, are those of packed rows.
        is_causal: whether without a mask a query sees no key after its own.
        bias: `(B or 1, Hq, M, K)`, added to the scores; `None` for none.
        cap: what a score's size stays below: `cap * tanh(score / cap)`; `None` for none.
        sinks: `(Hq,)` scores of a key that adds no value; `None` for none.

    Attributes:
        fits (`bool`): whether the core can compute it.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        *,
        is_causal: bool = True,
        bias: torch.Tensor | None = None,
        packed: PackedRows | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._packed, self._cap = packed, cap or 0.0
        self._sinks = None if sinks is None else sinks.detach().float().contiguous()
        hides_future = mask is None and is_causal and query.shape[2] > 1
        self.shape = query.shape[1:3]  # as the result has it
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.value_dim = value.shape[-1]
        if query.dtype in cpu.HALVES:
            query, key, value = (
                _padded(query, LANES),
                _without_gaps(_padded(key, LANES)),
                _without_gaps(_padded(value, LANES)),
            )
        fits = not hides_future and _fits(query, key, value, mask, packed)
        if bias is not None:
            fits = fits and packed is None and sinks is None and bias.shape[1:] == (*self.shape, key.shape[2])
        fits = fits and (sinks is None or (sinks.is_cpu and sinks.shape == query.shape[1:2]))
        if fits and bias is not None:
            query, key, value, mask = _by_head(query, key, value, mask, bias)
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self._threads = cpu.threads_for(query.numel() * key.shape[2] * 2) if fits else 0
        self.fits = self._threads > 0

    def __call__(self) -> torch.Tensor:
        """The attention, `(B, M, Hq, Dv)`; `(1, N, Hq, Dv)` of packed rows."""
        query, key, value, packed = self.query, self.key, self.value, self._packed
        batch, num_heads, num_queries, dim = query.shape
        num_kv_heads, num_keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
        out = query.new_empty(batch, num_queries, num_heads, value_dim)
        mask, row, line, bounds, sinks = 0, 0, 0, 0, 0 if self._sinks is None else self._sinks.data_ptr()
        if packed is not None:
            batch, num_queries, bounds = len(packed.counts), packed.width, packed.bounds.data_ptr()
        if (given := self.mask) is not None:
            numbers = given
            if given.dtype != torch.float32 or given.stride(3) != 1:
                numbers = prepared(given, ("core",), lambda: additive(given, torch.float32, -torch.inf).contiguous())
            mask, row, line = numbers.data_ptr(), numbers.stride(0) * (len(numbers) > 1), numbers.stride(2)
        cpu.core.attention(
            (query.data_ptr(), key.data_ptr(), value.data_ptr(), mask, sinks, out.data_ptr(), bounds),
            (batch, num_kv_heads, num_heads // num_kv_heads, num_queries, num_keys, dim, value_dim),
            (*query.stride()[:3], *key.stride()[:2], *value.stride()[:3], row, line),
            (self.scaling, self._cap),
            cpu.KINDS[query.dtype],
            self._threads,
            0 if self._threads == 1 else cpu.team(),
        )
        if query.shape[1:3] != self.shape:
            out = out.view(-1, *self.shape, value_dim).transpose(1, 2)
        return out if value_dim == self.value_dim else out[..., : self.value_dim]

    def note(self, recorder: Recorder, out: torch.Tensor) -> None:
        """Report the call and its result."""
        tensors = (self.query, self.key, self.value, self.mask, self._sinks, out)
        batch = len(self.query) if self._packed is None else len(self._packed.counts)
        numbers = {"scaling": self.scaling, "cap": self._cap, "kv_heads": self.key.shape[1], "batch": batch}
        recorder.core("attention", tensors, numbers)


class CausalAttention:
    """Attention of a whole prompt, in which no query sees a key after its own: block by block, without those keys.

    A query's sums are those of `CoreAttention` with a mask that hides them.

    Args:
        query, key, value: as of `CoreAttention`, with at least as many keys as queries: a static cache's buffers have
            more, which no query sees.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> None:
        count, longest = query.shape[2], -(-query.shape[2] // SPAN) * SPAN
        self._blocks = []
        for start in range(0, count, BLOCK):
            end = min(start + BLOCK, count)
            mask = _staircase(longest)[:, :, : end - start, longest - start : longest - start + end]
            own = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
            self._blocks.append(CoreAttention(*own, mask, scaling))
        self.fits = key.shape[2] >= count and all(block.fits for block in self._blocks)

    def __call__(self) -> torch.Tensor:
        """The attention, `(B, M, Hq, Dv)`."""
        return torch.cat([block() for block in self._blocks], dim=1)

    def note(self, recorder: Recorder, out: torch.Tensor) -> None:
        """Report the call, which no step of a few tokens makes."""
        raise NotImplementedError


@functools.lru_cache(maxsize=2)
def _staircase(before: int) -> torch.Tensor:
    """`(1, 1, BLOCK, before + BLOCK)`: what a mask adds to the scores of queries that follow so many keys."""
    hidden = torch.full((BLOCK, BLOCK), -torch.inf, device=HOST).triu(1)
    return pad(hidden, (before, 0))[None, None]


def _padded(heads: torch.Tensor, multiple: int) -> torch.Tensor:
    """Heads of other sizes with zeros up to the next that the core takes, which change no sum."""
    missing = -heads.shape[-1] % multiple
    return pad(heads, (0, missing)) if missing else heads


def _without_gaps(heads: torch.Tensor) -> torch.Tensor:
    """Keys or values next to each other, which those that a layer splits from one product are not."""
    return heads if heads.stride()[-2:] == (heads.shape[-1], 1) else heads.contiguous()


def _by_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same attention with a row of the batch for each key/value head, whose mask adds the heads' biases."""
    (batch, heads, num_queries, dim), (kv_heads, num_keys) = query.shape, key.shape[1:3]
    bias = bias.float() if mask is None else bias + additive(mask, torch.float32, -torch.inf)
    rows, queries = batch * kv_heads, heads // kv_heads * num_queries
    bias = bias.expand(batch, heads, num_queries, num_keys).reshape(rows, 1, queries, num_keys)
    keys, values = (one.reshape(rows, 1, num_keys, one.shape[3]) for one in (key, value))
    return query.reshape(rows, 1, queries, dim), keys, values, bias


def _fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, packed: PackedRows | None
) -> bool:
    """Returns whether the core can read all of them."""
    if not (query.dim() == key.dim() == value.dim() == 4) or not query.numel() or not key.numel():
        return False
    batch, num_heads, num_queries, dim = query.shape
    if packed is not None:
        batch, num_queries = len(packed.counts), packed.width
    num_keys, value_dim = key.shape[2], value.shape[3]
    return (
        all(type(tensor) is torch.Tensor and tensor.device.type == "cpu" for tensor in (query, key, value))
        and query.dtype in cpu.KINDS
        and query.dtype == key.dtype == value.dtype
        and (query.dtype != torch.float32 or num_queries <= MOST_QUERIES)
        and len(key) == len(value) == batch
        and num_heads % key.shape[1] == 0
        and key.shape[1] == value.shape[1]
        and key.shape[3] == dim
        and value.shape[2] == num_keys
        and dim % LANES == 0
        and value_dim % LANES == 0
        and query.stride(3) == 1
        and key.stride()[2:] == (dim, 1)
        and value.stride(3) == 1
        and (mask is None or _mask_fits(mask, (batch, num_queries, num_keys)))
    )


def _mask_fits(mask: torch.Tensor, shape: tuple[int, int, int]) -> bool:
    batch, num_queries, num_keys = shape
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and tuple(mask.shape[1:]) == (1, num_queries, num_keys)
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )
