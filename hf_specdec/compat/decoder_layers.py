"""transformers' decoder layers, norms and rotary embeddings that draft heads are made of.

    Names                            Why
    `LlamaDecoderLayer`, ...         a head's layers are the target family's own, so attention kernels, rotary scaling
                                     and weight names are transformers'

Tried with transformers 5.23 and 5.24.
"""

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

__all__ = ["CONFIGS", "LAYERS", "config_of_layers"]

CONFIGS: Mapping[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# model type -> decoder layer, norm, rotary embedding
LAYERS: Mapping[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def config_of_layers(config: PretrainedConfig) -> PretrainedConfig:
    """The same configuration, its attention being torch's, which takes any mask."""
    own = type(config).from_dict(config.to_dict())
    own._attn_implementation = "sdpa"
    return own
