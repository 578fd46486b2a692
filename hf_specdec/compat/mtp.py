"""Names of transformers for multi-token prediction layers.

Names                              Why
`modeling_layers.MtpModel`         the layers, whose loader maps the names of some checkpoints
`WeightRenaming`, `get_checkpoint_conversion_mapping`
                                   those names, by the name of that class; the blocks', by the type of the model
`get_model_conversion_mapping`      the main model's names and merges, without those of a quantised one
`update_weight_conversions`        adds to conversions that FP8 weights are widened by their scales
`_get_resolved_checkpoint_files`   the loader's list of a checkpoint's files
`_keys_to_ignore_on_load_unexpected`
                                   by which a model says that its checkpoints hold such layers
`_project_to_logits`               the shared head as the main model applies it
`_experts_implementation`          how a model's experts are computed

Tried with transformers 5.23 and 5.24.
"""

from typing import Any

import torch
from safetensors import safe_open
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from hf_specdec.compat.attention import MASKED, attention_implementation, set_attention_implementation
from hf_specdec.compat.models import text_config
from hf_specdec.compat.modules import as_read_by

__all__ = [
    "MtpModel",
    "WeightRenaming",
    "get_checkpoint_conversion_mapping",
    "get_model_conversion_mapping",
    "has_own_mtp",
    "shared_logits",
    "use_float64_experts",
    "use_mask_attention",
    "weight_names",
    "widening",
]


def has_own_mtp(target: PreTrainedModel) -> bool:
    """True if transformers can find the MTP layers that the model announces."""
    announced = getattr(text_config(target.config), "num_mtp_layers", None)
    return bool(announced and target._keys_to_ignore_on_load_unexpected)


def weight_names(path: str) -> list[str]:
    """Names of all weights of a checkpoint."""
    files, sharded = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=path,
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
    )
    names: list[str] = list(sharded["weight_map"]) if sharded else []
    for file in () if sharded else files or ():
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
    return names


def widening(conversions: list[Any], mtp: MtpModel) -> list[Any]:
    """Conversions that also multiply FP8 weights by the scales of their blocks, which lie beside them."""
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    widened: list[Any] = quantizer.update_weight_conversions(conversions, mtp)
    return widened


def shared_logits(mtp: MtpModel, states: torch.Tensor) -> torch.Tensor:
    """`(..., vocab_size)` of the main model's head, scaled and cut as the main model does."""
    logits: torch.Tensor = mtp._project_to_logits(as_read_by(mtp.shared_head, states))
    return logits


def use_float64_experts(mtp: MtpModel) -> None:
    """Let the layers compute their experts one after another where torch's grouped product has no float64."""
    if getattr(mtp.config, "_experts_implementation", None) == "grouped_mm":
        mtp.config._experts_implementation = "eager"


def use_mask_attention(mtp: MtpModel) -> None:
    """Let the layers use an attention that takes any mask, torch's instead of a kernel.

    Their configuration is a copy of the target's.
    """
    if attention_implementation(mtp.config) not in MASKED:
        set_attention_implementation(mtp.config, "sdpa")
