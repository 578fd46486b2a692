"""A stand-in for the flash_attn library, in plain torch: transformers' own code for FlashAttention runs on top of it.

It takes what the library takes: no mask, but causal order from the bottom right, windows, soft-capping, sinks, and
sequences packed one behind the other.

with flash_attention(model):                # attn_implementation="flash_attention_2", as if it were installed
    model.generate(...)
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations import flash_attention as integration

__all__ = ["deaf_attention", "flash_attention"]

NAME = "flash_attention_2"


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(B, M, Hq, D)` over `(B, K, Hkv, D)`."""
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bmhd,bkhd->bhmk", query, key).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None] - torch.arange(key.shape[1])
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[1]].to(value.dtype)
    return torch.einsum("bhmk,bkhd->bmhd", weights, value)


def flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(tokens of all sequences, Hq, D)`; each sequence by itself."""
    outputs = []
    for row in range(len(cu_seqlens_q) - 1):
        own = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        keys = slice(int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1]))
        parts = (query[None, own], key[None, keys], value[None, keys])
        options: Any = {"window_size": window_size, "softcap": softcap, "s_aux": s_aux}
        outputs.append(flash(*parts, softmax_scale=softmax_scale, causal=causal, **options)[0])
    return torch.cat(outputs)


@contextlib.contextmanager
def flash_attention(model: PreTrainedModel, name: str = NAME) -> Iterator[PreTrainedModel]:
    """Inside, the model and its parts use `name`, which transformers finds installed."""
    library = modeling_flash_attention_utils
    pads = (library._pad_input, library._unpad_input)
    functions = ((flash, flash_varlen, None, *pads), (library._lazy_define_process_function(flash_varlen), dict))
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    with (
        mock.patch.object(library, "lazy_import_flash_attention", lambda *_, **__: functions),
        mock.patch.object(integration, "get_target_dtype", lambda *_: None),  # the library takes no fp32, this does
    ):
        for config in configs.values():
            config._attn_implementation_internal = name
        try:
            yield model
        finally:
            for key, config in configs.items():
                config._attn_implementation_internal = before[key]


def deaf_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """An attention function in transformers' sense, deaf to masks: causal from the bottom right."""
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return AttentionInterface()["sdpa"](module, query, key, value, mask[None, None], **kwargs)
