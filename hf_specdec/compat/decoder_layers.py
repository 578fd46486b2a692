"""transformers' decoder layers, norms and rotary embeddings that draft heads are made of.

    Names                            Why
    `LlamaDecoderLayer`, ...         a head's layers are the target family's own, so attention kernels, rotary scaling
                                     and weight names are transformers'
    `sdpa_attention_forward`         attention with given masks, grouped heads as the device takes them
    `rotate_half`                    rotary embeddings of queries and keys of different lengths

Tried with transformers 5.23 and 5.24.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

CONFIGS: Mapping[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# model type -> decoder layer, norm, rotary embedding
LAYERS: Mapping[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def config_of_layers(config: PretrainedConfig) -> PretrainedConfig:
    """The same configuration, its attention being torch's, which takes any mask."""
    copy = type(config).from_dict(config.to_dict())
    copy._attn_implementation = "sdpa"
    return copy


def rotated(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Queries or keys `(batch, heads, T, head_dim)` at positions of which `(batch, T, head_dim)` are the angles."""
    turned: torch.Tensor = states * cosine[:, None] + rotate_half(states) * sine[:, None]
    return turned


def attend(
    attention: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`(batch, Q, heads, head_dim)` that `queries` read of `values`, `(batch, heads, ..., head_dim)` both.

    Args:
        attention: the layer's module, which says how heads are grouped and scaled.
        mask: `(batch, 1, Q, K)` bool.
    """
    mixed: torch.Tensor = sdpa_attention_forward(
        attention, queries, keys, values, mask, scaling=attention.scaling, is_causal=False
    )[0]
    return mixed
