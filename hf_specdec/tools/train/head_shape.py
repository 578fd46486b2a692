"""The shape of a head to be trained, from the target's configuration."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.engine.head_pairing import check_target
from hf_specdec.errors import ConfigError
from hf_specdec.methods.eagle3.head_config import default_layer_ids

USUAL_HEAD_DIM = 64
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


def chosen_layers(target: PreTrainedModel, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    """The hidden states that the head reads.

    Raises:
        ConfigError: one of them is not there.
        UnsupportedModelError: no head can read this target.
    """
    check_target(target, embedding_width=compat.text_config(target.config).hidden_size)
    num_layers = int(compat.text_config(target.config).num_hidden_layers)
    if layer_ids is None:
        return default_layer_ids(num_layers)
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) > num_layers:
        rule = f"must be different numbers from 0 to {num_layers}, the target's number of layers"
        raise ConfigError("layer_ids", rule, tuple(layer_ids), f"Use {default_layer_ids(num_layers)}.")
    return tuple(layer_ids)


def layer_config(config: PretrainedConfig, layer_class: type[PretrainedConfig], *, num_layers: int) -> PretrainedConfig:
    """Layers shaped as the target's, as far as its configuration says."""
    values: dict[str, Any] = {name: getattr(config, name, None) for name in COPIED}
    values = {name: value for name, value in values.items() if value is not None}
    if not isinstance(values.get("num_attention_heads"), int):
        values["num_attention_heads"] = max(config.hidden_size // USUAL_HEAD_DIM, 1)
    if not isinstance(values.get("num_key_value_heads"), int):  # qwen3's own default is 32, and a head_dim of 128
        values["num_key_value_heads"] = values["num_attention_heads"]
    values.setdefault("head_dim", config.hidden_size // values["num_attention_heads"])
    values.setdefault("intermediate_size", 3 * config.hidden_size)
    if "rope_type" not in (values.get("rope_parameters") or {}):  # one for each kind of layer
        values.pop("rope_parameters", None)
    if isinstance(values["intermediate_size"], list):
        values["intermediate_size"] = max(values["intermediate_size"])
    return layer_class(num_hidden_layers=num_layers, tie_word_embeddings=False, **values)
