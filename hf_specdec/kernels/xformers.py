"""xformers' memory-efficient attention over transformers' tensors. The only file that imports xformers, at first use.

A kernel has one key/value head for each query head. Grouped queries are therefore folded into the query length,
(B, g*M, Hkv, D), so that no key or value is copied.
"""

import importlib.util
import logging
from typing import Any

import torch

from hf_specdec.errors import MissingExtraError
from hf_specdec.kernels.masks import additive, prepared

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENT_BYTES = 16  # of a head and of every row of a bias: 8 half or 4 single precision numbers


def check_installed() -> None:
    """Raise where xformers is not installed.

    Raises:
        MissingExtraError: with the line that installs it.
    """
    if importlib.util.find_spec("xformers") is None:
        raise MissingExtraError("xformers", "xformers", 'attn_implementation="xformers"')


class XformersKernel:
    """xformers picks the operator: FlashAttention without a bias, CUTLASS with one."""

    def __init__(self) -> None:
        self._fmha: Any = None

    def reason_against(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Reason that is known without asking xformers, which composes a long message each time."""
        if query.device.type != "cuda":
            return f"xformers has no kernel for {query.device.type}"
        if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
            return f"xformers has no kernel for {query.dtype}".replace("torch.", "")
        step = ALIGNMENT_BYTES // query.dtype.itemsize
        for size in (query.shape[-1], value.shape[-1]):
            if size % step:
                return f"xformers' kernels need head dimensions that are multiples of {step}, not {size}"
        return None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Softmax of the scaled and biased scores, times the values: `(B, M, H, Dv)`.

        Args:
            query: `(B, M, H, D)`; key, value: `(B, K, H, D)` and `(B, K, H, Dv)`; strides as they come.
            bias: `(B, H, M, K)` in the query's dtype, every stride but the last a multiple of 16 bytes.

        Raises:
            NotImplementedError: no kernel takes these.
        """
        if self._fmha is None:
            self._fmha = _import()
        output: torch.Tensor = self._fmha.memory_efficient_attention_forward(
            query, key, value, attn_bias=bias, scale=scale
        )
        return output


def attend(
    kernel: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys; returns `(B, M, Hq, Dv)`.

    Args:
        kernel: `XformersKernel`, or one with its methods.
        mask: `(B or 1, Hq or 1, M, K)`, of booleans or additive; `None` hides nothing.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    folded, bias = fold_queries(query, num_kv_heads), None
    if mask is not None:
        kind = (query.dtype, num_heads, num_kv_heads)
        bias = prepared(mask, kind, lambda: fold_bias(mask, *kind)).expand(len(folded), num_kv_heads, -1, -1)
    output = kernel(folded, key.transpose(1, 2), value.transpose(1, 2), bias, scale)
    return unfold(output, num_heads).to(query.dtype)


def fold_queries(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`(B, Hq, M, D)` to `(B, g*M, Hkv, D)`: the g query heads of a key/value head one behind the other."""
    batch, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // num_kv_heads
    return query.reshape(batch, num_kv_heads, groups * num_queries, head_dim).transpose(1, 2)


def unfold(output: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`(B, g*M, Hkv, Dv)` to `(B, M, Hq, Dv)`, contiguous."""
    batch, folded, num_kv_heads, head_dim = output.shape
    num_queries = folded * num_kv_heads // num_heads
    return output.transpose(1, 2).reshape(batch, num_heads, num_queries, head_dim).transpose(1, 2).contiguous()


def fold_bias(mask: torch.Tensor, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """`(B, 1 or Hq, M, K)` to an additive `(B, 1 or Hkv, g*M, K)` whose rows begin at multiples of 16 bytes.

    What hides a key is finite, and far from the end of the numbers: a row that sees nothing, as padding does, then
    comes out as some average and not as NaN.
    """
    batch, heads, num_queries, num_keys = mask.shape
    groups, kv_heads = num_heads // num_kv_heads, 1 if heads == 1 else num_kv_heads
    step = ALIGNMENT_BYTES // dtype.itemsize
    width = -(-num_keys // step) * step
    bias = torch.empty((batch, kv_heads, groups * num_queries, width), dtype=dtype, device=mask.device)
    values = additive(mask, dtype, lowest=-(2.0**15) if dtype == torch.float16 else -(2.0**100))
    by_group = bias.view(batch, kv_heads, groups, num_queries, width)[..., :num_keys]
    by_group.copy_(values.unsqueeze(2) if heads == 1 else values.reshape(by_group.shape))
    return bias[..., :num_keys]


def _import() -> Any:
    """`xformers.ops.fmha`, ready for the torch that is here.

    Its wheel is built for one CUDA version. On another torch its own binary does not load, and every operator then
    refuses because xformers "wasn't built with CUDA". Those used here are torch's own
    (`aten::_flash_attention_forward`, `aten::_efficient_attention_forward`) and need nothing of that binary, so the
    refusal is lifted and the import's warning about it left out.
    """
    check_installed()
    logger = logging.getLogger("xformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import common
    finally:
        logger.setLevel(before)
    if torch.version.cuda is not None:
        setattr(common, "_built_with_cuda", True)  # noqa: B010
    return fmha
