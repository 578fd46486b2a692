"""Attention functions that stand in for kernels: one that takes no mask, one that is strict about its inputs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations import flash_attention as integration

from hf_specdec.compat.attention import attention_function_of
from hf_specdec.kernels.xformers import KernelAttention, register

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
        ours = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        keys = slice(int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1]))
        parts = (query[None, ours], key[None, keys], value[None, keys])
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

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        self.calls.append((query.shape[1], key.shape[1], bias is not None))
        self.check(query, key, value, bias)
        scores = torch.einsum("bmhd,bkhd->bhmk", query.float(), key.float()) * scale
        if bias is not None:
            scores = scores + bias.float()
        output = torch.einsum("bhmk,bkhd->bmhd", scores.softmax(dim=-1), value.float())
        return output.to(query.dtype)

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


def strict_attention(name: str) -> Any:
    """The attention of a strict kernel under `name`, registered once for all tests."""
    if attention_function_of(name) is None:
        register(KernelAttention(name, StrictKernel(), "cpu"))
    return attention_function_of(name)
