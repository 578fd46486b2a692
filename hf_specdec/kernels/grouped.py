"""Torch's attention over grouped heads without copies of keys and values.

Under a mask transformers copies each key/value head once for every query head of its group: for some nodes over a long
text that takes several times as long as their attention. In compiled forwards it does so for one token too. Here the
group's queries are folded into the query length instead. Every row of the result is computed from the same numbers;
sums may be rounded in another order.
"""

import torch

from hf_specdec.common.transfer import is_host
from hf_specdec.kernels.masks import additive, prepared


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
