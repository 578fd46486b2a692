"""All kernels of the compiled core for one model's forwards of a few tokens.

A block, in the thread that enters it:

    kernels = CpuKernels(model)
    with kernels:
        model(**inputs)
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import replaced
from hf_specdec.compat.devices import has_tiles
from hf_specdec.kernels.few_query import FewQueryAttention, watch
from hf_specdec.kernels.few_token import FewTokenLayers
from hf_specdec.kernels.own_forward import counted


class CpuKernels:
    """A block whose attention and layers the core computes: in fp32 where it is faster, in bf16 and fp16 where it can.

    Args:
        model: whose forwards they are.
        device: where a network computes that is no model of transformers, and whose attention is torch's.
        is_compiled: whether these forwards are compiled: their layers keep what they were traced with.
    """

    def __init__(
        self, model: torch.nn.Module, *, device: torch.device | str | None = None, is_compiled: bool = False
    ) -> None:
        attending = cast(PreTrainedModel, model) if device is None else None  # or a wrapper that looks like one
        self._attention = FewQueryAttention(attending, device=device or "cpu", is_compiled=is_compiled)
        self._layers = FewTokenLayers(model, is_used=not is_compiled)
        self._watching = contextlib.ExitStack()

    @property
    @contextlib.contextmanager
    def of_prompts(self) -> Iterator[None]:
        """The block for forwards of prompts, which leaves to torch what it computes faster."""
        with contextlib.ExitStack() as stack:
            if self._attends_to_prompts:
                stack.enter_context(counted())  # of steps alone is it asked who computes
                stack.enter_context(self._attention)
            if self._attends_to_prompts or self._layers.reads_prompts:
                stack.enter_context(self._layers.of_prompts)
            yield

    @property
    def _attends_to_prompts(self) -> bool:
        """True if the core computes the attention of prompts: in halves, where torch is faster only by tiles."""
        return self._layers.rounds_alike and not has_tiles()

    @property
    def least_piece(self) -> int:
        """As of `FewTokenLayers`, of models whose steps round each token alike."""
        return self._layers.least_piece if self._attends_to_prompts else 0

    @property
    def takes_packed_rows(self) -> bool:
        """Returns whether the attention takes packed rows."""
        return self._attention.takes_packed_rows

    def packing(self, packed: PackedRows | None) -> contextlib.AbstractContextManager[Any]:
        """A block whose queries are `(1, heads, N, head_dim)`, of packed rows, and whose keys are those of all rows."""
        return contextlib.nullcontext() if packed is None else replaced(packed=packed)

    @property
    def rounds_alike(self) -> bool:
        """True if a token of a step is rounded the same beside any others, which one of a prompt need not be."""
        return self._layers.rounds_alike

    def __enter__(self) -> None:
        self._attention.__enter__()
        self._layers.__enter__()
        if (seen := watch()) is not None and self._layers.rounds_alike:
            self._watching.enter_context(seen)

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        self._layers.__exit__()
        self._attention.__exit__()
