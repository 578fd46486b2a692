"""Forms of a mask that kernels need, and torch's attention over grouped heads without copies of keys and values.

A form is kept on the mask, as all layers of a forward share one: it lives as long as the mask tensor and is forgotten
when the mask is changed in place.

Under a mask transformers copies each key/value head once for every query head of its group: for some nodes over a long
text that takes several times as long as their attention. In compiled forwards it does so for one token too. Here the
group's queries are folded into the query length instead. Every row of the result is computed from the same numbers;
sums may be rounded in another order.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from hf_specdec.common.transfer import is_host
from hf_specdec.compat.attention import version_of

ATTRIBUTE = "_hf_specdec_notes"


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
