"""From transformers' attention arguments to a kernel's and back: grouped heads, biases, the text apart from the tree.

A kernel has one key/value head for each query head. Grouped queries are therefore folded into the query length,
(B, g*M, Hkv, D), so that no key or value is copied. Where all queries see the beginning of the text, that part is
computed without a mask, the rest with a small one, and the two are merged by their log-sum-exp, which is exact. Knows
torch only.
"""

from typing import Protocol

import torch

from hf_specdec.kernels.masks import additive, open_columns, prepared

ALIGNMENT_BYTES = 16  # of every row of a bias: 8 half or 4 single precision numbers
# A kernel with a tensor bias walks along the keys in one block per head and 64 queries; without a bias they are split
# over the device. An H200 has 132 multiprocessors, a model of 8 key/value heads keeps 8 busy: some 40 microseconds at
# 2,048 keys, what the second kernel and the merge cost in launches. Argued from the hardware, not measured.
LONG_TEXT = 2048


class Kernel(Protocol):
    """Attention over as many key/value heads as query heads."""

    def reason_against(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Reason why there is no kernel for tensors of this kind, `(B, heads, length, head_dim)`, or `None`."""
        ...

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax of the scaled and biased scores, times the values.

        Args:
            query: `(B, M, H, D)`; key, value: `(B, K, H, D)` and `(B, K, H, Dv)`; strides as they come.
            bias: `(B, H, M, K)` in the query's dtype, every stride but the last a multiple of 16 bytes.

        Returns:
            `(B, M, H, Dv)`, and the natural logarithm of the sum of exponentials, `(B, H, M)` in fp32.

        Raises:
            NotImplementedError: no kernel takes these.
        """
        ...


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    long_text: int,
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys; returns `(B, M, Hq, Dv)`.

    Args:
        mask: `(B or 1, Hq or 1, M, K)`, of booleans or additive; `None` hides nothing.
        long_text (`int`): columns that all queries see from which on they are computed apart.
    """
    num_heads, num_kv_heads, text = query.shape[1], key.shape[1], 0 if mask is None else open_columns(mask)
    folded, key, value = fold_queries(query, num_kv_heads), key.transpose(1, 2), value.transpose(1, 2)
    if text < long_text or text >= key.shape[1]:
        text = 0
    bias = None
    if mask is not None:
        shape = (text, query.dtype, num_heads, num_kv_heads)
        tail = mask[..., text:]
        bias = prepared(mask, shape, lambda: fold_bias(tail, query.dtype, num_heads, num_kv_heads))
        bias = bias.expand(len(folded), num_kv_heads, -1, -1)
    output, lse = kernel(folded, key[:, text:], value[:, text:], bias, scale)
    if text:
        output = merge(*kernel(folded, key[:, :text], value[:, :text], None, scale), output, lse)
    return unfold(output, num_heads).to(query.dtype)


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """True if the bias takes no more room than the copies of keys and values that folding saves, and has a known shape.

    The bias grows with the number of queries: beyond some hundreds, a padded prompt's, copying is the smaller evil.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    if mask.dim() != 4 or mask.shape[-2:] != (num_queries, key.shape[2]):
        return False
    groups = num_heads // key.shape[1]
    copies = batch * num_heads * (head_dim + value.shape[-1])
    rows = mask.shape[0] * num_queries * (groups if mask.shape[1] == 1 else num_heads)
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, num_heads) and rows <= copies


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


def merge(first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor) -> torch.Tensor:
    """Attention over two sets of keys from that over each: outputs `(B, M, H, Dv)`, log-sum-exp `(B, H, M)`; in fp32.

    out = (e^l1 * out1 + e^l2 * out2) / (e^l1 + e^l2)
    """
    weight = torch.sigmoid((second_lse - first_lse).float()).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), weight)
