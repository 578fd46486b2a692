"""Attention of a few queries by the compiled core."""

import functools

import torch
from torch.nn.functional import pad

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import Recorder
from hf_specdec.common.transfer import HOST
from hf_specdec.kernels import cpu
from hf_specdec.kernels.masks import additive, prepared

MOST_QUERIES = 128  # of a row in fp32
BLOCK = 128  # queries of a prompt at once
SPAN = 1024  # tokens in whose multiples masks of blocks are kept
LANES = 8  # that sizes of heads are a multiple of


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
