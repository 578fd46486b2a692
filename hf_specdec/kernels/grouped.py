"""Torch's attention over grouped heads, without copies of keys and values, in this package's own forwards on a CPU.

Under a mask transformers copies each key/value head once for every query head of its group: for some nodes over a long
text that takes several times as long as their attention. Here the group's queries are folded into the query length
instead. Every row of the result is computed from the same numbers; sums may be rounded in another order.

    grouped = GroupedHeads(model)
    with grouped:           # in this thread, until the block ends
        model(**inputs)
"""

import threading
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation
from hf_specdec.compat.attention import attention_function_of, register_attention
from hf_specdec.kernels.layout import fits
from hf_specdec.kernels.masks import additive, prepared

__all__ = ["GroupedHeads"]

NAME = "sdpa"
# Arguments that change the result and that only transformers' function knows.
FOREIGN = ("position_bias", "cache", "softcap")


class _Here(threading.local):
    """How many blocks this thread is in."""

    depth = 0


_here = _Here()
_register_lock = threading.Lock()


class GroupedHeads:
    """A block in which torch's attention folds the queries of a group, in the thread that enters it.

    Outside, and for what it cannot fold, the function that is registered for `"sdpa"` is transformers' own. Off the CPU
    nothing is wrapped.

    Args:
        model: whose attention it is; `None` for one that is known to be torch's.
        device: where that one computes.
    """

    def __init__(self, model: PreTrainedModel | None = None, device: torch.device | str = "cpu") -> None:
        is_torchs = model is None or attention_implementation(model.config) == NAME
        self.is_used = is_torchs and torch.device(device if model is None else model.device).type == "cpu"
        if self.is_used:
            _register()

    def __enter__(self) -> None:
        if self.is_used:
            _here.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.is_used:
            _here.depth -= 1


class _FoldingAttention:
    """The attention function that was registered, and the folding one inside a block."""

    def __init__(self, original: Any) -> None:
        self.original = original

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
        is_inside = not torch.compiler.is_compiling() and _here.depth > 0 and not dropout
        if is_inside and attention_mask is not None and _can_fold(module, query, key, value, attention_mask, kwargs):
            return _folded(query, key, value, attention_mask, scaling), None
        attended: tuple[torch.Tensor, torch.Tensor | None] = self.original(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return attended


def _register() -> None:
    """Put the folding function in the place of the one that is registered; once."""
    with _register_lock:
        original = attention_function_of(NAME)
        if not isinstance(original, _FoldingAttention):
            register_attention(NAME, _FoldingAttention(original))


def _can_fold(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    kwargs: dict[str, Any],
) -> bool:
    """Whether transformers would copy keys and values, and nothing is asked for that only its function knows."""
    groups = getattr(module, "num_key_value_groups", 1)
    return (
        groups > 1
        and query.device.type == "cpu"
        and query.shape[2] > 1
        and query.shape[1] == groups * key.shape[1]
        and mask.dim() == 4
        and mask.shape[1] == 1
        and fits(query, key, value, mask)
        and not any(kwargs.get(name) is not None for name in FOREIGN)
        and not kwargs.get("output_attentions")
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def _folded(
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
