"""Attention of a few queries in this package's own forwards: on a CPU by the compiled core, in fp32 where it is faster.

Elsewhere on a CPU, and in the graphs that are compiled here, torch computes it without copies of grouped heads.

    attention = FewQueryAttention(model)
    with attention:        # in this thread, until the block ends
        model(**inputs)
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.transfer import is_host
from hf_specdec.compat import attention_implementation, is_traced_for_us
from hf_specdec.compat.attention import attention_function_of, register_attention, sdpa_attention_forward
from hf_specdec.kernels import cpu
from hf_specdec.kernels.core_attention import CoreAttention
from hf_specdec.kernels.grouped import can_fold, folded
from hf_specdec.kernels.key_order import FOREIGN, attended_in_order, is_key_order
from hf_specdec.kernels.products import Watch

NAME = "sdpa"


@dataclass(slots=True)
class Attended:
    """Attention of the forwards in a `counted` block.

    Attributes:
        by_core (`int`): calls that the core has computed.
        by_torch (`set[str]`): classes of the modules whose attention torch has computed, and functions of torch that
            have added up other products.
    """

    by_core: int = 0
    by_torch: set[str] = field(default_factory=set)


class _Here(threading.local):
    """Depth of blocks in this thread, whether the core may compute in them, their packed rows, and what counts them."""

    depth = 0
    has_core = False
    packed: PackedRows | None = None
    counting: Attended | None = None


_here = _Here()
_register_lock = threading.Lock()


@contextlib.contextmanager
def counted() -> Iterator[Attended]:
    """A block whose calls of torch's attention, in blocks with the core in this thread, are counted."""
    outer, _here.counting = _here.counting, Attended()
    try:
        yield _here.counting
    finally:
        _here.counting = outer


def watch() -> Watch | None:
    """A block whose products torch computes are counted too, where attention is."""
    return None if _here.counting is None else Watch(_here.counting.by_torch)


class FewQueryAttention:
    """A block in which torch's attention takes the faster way, in the thread that enters it.

    Outside, and for what is not known here, the function that is registered for `"sdpa"` is transformers' own. Off the
    CPU nothing is wrapped unless the block's forwards are compiled.

    Args:
        model: whose attention it is; `None` for one that is known to be torch's.
        device: where that one computes.
        is_compiled: whether this package compiles the forwards of the block.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        device: torch.device | str = "cpu",
        *,
        is_compiled: bool = False,
    ) -> None:
        is_torchs = model is None or attention_implementation(model.config) == NAME
        self._is_on_host = is_host(torch.device(device if model is None else model.device))
        self.is_used = is_torchs and (self._is_on_host or is_compiled)
        if self.is_used:
            _register()

    def __enter__(self) -> None:
        if not self.is_used:
            return
        if not _here.depth:
            _here.has_core = self._is_on_host and cpu.why_unused() is None and cpu.is_usual()
        _here.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.is_used:
            _here.depth -= 1

    @property
    def takes_packed_rows(self) -> bool:
        """Returns whether queries of packed rows find the keys of their own rows."""
        return self.is_used and self._is_on_host and isinstance(attention_function_of(NAME), _Attention)

    @contextlib.contextmanager
    def packing(self, packed: PackedRows) -> Iterator[None]:
        """A block whose queries are `(1, heads, N, head_dim)`, of packed rows, and whose keys are those of all rows."""
        outer, _here.packed = _here.packed, packed
        try:
            yield
        finally:
            _here.packed = outer


class _Attention:
    """transformers' attention function, and inside a block the faster ones.

    Attributes:
        original: transformers'.
    """

    original = staticmethod(sdpa_attention_forward)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def torchs() -> tuple[torch.Tensor, torch.Tensor | None]:
            if packed is None:
                return padded(query)
            attended, weights = padded(packed.pad(query.transpose(1, 2)).transpose(1, 2))  # (B, heads, W, head_dim)
            return packed.pack(attended), weights

        def padded(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            if is_known and attention_mask is not None and can_fold(module, query, key, value, attention_mask):
                return folded(query, key, value, attention_mask, scaling), None
            attended: tuple[torch.Tensor, torch.Tensor | None] = self.original(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
            return attended

        bias = kwargs.get("position_bias") if query.dtype in cpu.HALVES else None
        foreign = FOREIGN if bias is None else FOREIGN[1:]
        packed = None if torch.compiler.is_compiling() else _here.packed
        is_known = is_traced_for_us() if torch.compiler.is_compiling() else _here.depth > 0
        if is_known and attention_mask is not None and is_key_order(attention_mask):
            return attended_in_order(query, key, value, attention_mask, scaling, dropout=dropout, **kwargs), None
        is_known = is_known and not (
            dropout or any(kwargs.get(name) is not None for name in foreign) or kwargs.get("output_attentions")
        )
        if torch.compiler.is_compiling() or not (_here.depth and _here.has_core):
            return torchs()
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        own = None
        if is_known:
            own = CoreAttention(query, key, value, attention_mask, scaling, is_causal=causal, bias=bias, packed=packed)
        if (counting := _here.counting) is not None:
            if own is not None and own.fits:
                counting.by_core += 1
            else:
                counting.by_torch.add(type(module).__name__)
        if own is None or not own.fits:
            return torchs()
        if (trial := own.trial) is None:
            return own(), None
        return trial(lambda: (own(), None), torchs, own.work)


def _register() -> None:
    """Put the function with the faster ways in the place of transformers' own, unless somebody registered another."""
    with _register_lock:
        if attention_function_of(NAME) is sdpa_attention_forward:
            register_attention(NAME, _Attention())
