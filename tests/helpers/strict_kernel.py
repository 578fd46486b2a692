"""A kernel in plain torch that refuses what xformers' CUDA kernels would refuse, so that layouts are tested on a CPU.

attention = strict_attention("strict_long", long_text=4)      # registered: model.set_attn_implementation("strict_long")
attention.kernel.calls                                         # (queries, keys, whether there was a bias) of each call
"""

import dataclasses
from typing import Any

import torch

from hf_specdec.compat.attention import attention_function_of
from hf_specdec.kernels.attention import KernelAttention
from hf_specdec.kernels.layout import LONG_TEXT
from hf_specdec.kernels.registry import register

__all__ = ["StrictKernel", "strict_attention"]


@dataclasses.dataclass
class StrictKernel:
    """Reference attention with the CUTLASS operator's rules.

    Attributes:
        alignment: numbers that strides and head dimensions must be multiples of; by default 16 bytes of them.
    """

    alignment: int | None = None
    calls: list[tuple[int, int, bool]] = dataclasses.field(default_factory=list)

    def step(self, dtype: torch.dtype) -> int:
        return self.alignment or 16 // dtype.itemsize

    def reason_against(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
        sizes = (query.shape[-1], value.shape[-1])
        return "heads of this size" if any(size % self.step(query.dtype) for size in sizes) else None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((query.shape[1], key.shape[1], bias is not None))
        self.check(query, key, value, bias)
        scores = torch.einsum("bmhd,bkhd->bhmk", query.float(), key.float()) * scale
        if bias is not None:
            scores = scores + bias.float()
        output = torch.einsum("bhmk,bkhd->bmhd", scores.softmax(dim=-1), value.float())
        return output.to(query.dtype), scores.logsumexp(dim=-1)

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The operator's rules, as xformers states them."""
        batch, num_queries, heads, head_dim = query.shape
        assert key.shape == (batch, key.shape[1], heads, head_dim), "heads are not broadcast"
        assert value.shape[:3] == key.shape[:3]
        assert query.dtype == key.dtype == value.dtype
        step = self.step(query.dtype)
        for tensor in (query, key, value):
            assert tensor.shape[-1] % step == 0 and tensor.stride(-1) == 1
            assert tensor.stride(-2) % step == 0
        if bias is None:
            return
        assert bias.shape == (batch, heads, num_queries, key.shape[1]), "exactly this shape"
        assert bias.dtype == query.dtype, "additive, in the query's dtype"
        assert bias.stride(-1) == 1 and all(stride % step == 0 for stride in bias.stride()[:-1])
        assert bias.isfinite().all()


def strict_attention(name: str, *, long_text: int = LONG_TEXT) -> Any:
    """The attention of a strict kernel under `name`, registered once for all tests."""
    if attention_function_of(name) is None:
        register(KernelAttention(name, StrictKernel(), long_text=long_text))
    return attention_function_of(name)
