"""A new head: its shape and first weights come from the target, its vocabulary from the texts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_specdec.compat import models
from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.engine.head_pairing import check_target
from hf_specdec.errors import ConfigError
from hf_specdec.methods.eagle3.network import Eagle3Head, Eagle3HeadConfig, default_layer_ids

MOST_DRAFT_TOKENS = 32_000
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


def new_head(
    target: PreTrainedModel, layer_ids: tuple[int, ...], counts: torch.Tensor, draft_vocab_size: int | None
) -> Eagle3Head:
    """A head in fp32 that has learned nothing yet; its output layer begins as the target's.

    Args:
        counts: `(vocab_size,)`, how often each token stands in the texts.
        draft_vocab_size: tokens to draft, the most frequent ones; `None` is all, at most 32,000.
    """
    text_config = models.text_config(target.config)
    layer = layer_config(text_config, CONFIGS["qwen3" if text_config.model_type == "qwen3" else "llama"])
    vocab_size = len(counts)
    size = min(draft_vocab_size or MOST_DRAFT_TOKENS, vocab_size)
    config = Eagle3HeadConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=layer.hidden_size,
        layer_ids=layer_ids,
        norm_before_residual=True,
        target_name=str(target.config.name_or_path) or None,
        target_architectures=(type(target).__name__,),
    )
    head = Eagle3Head(config)
    if size < vocab_size:
        head.set_target_ids(counts.topk(size).indices.sort().values)
    weight: Any = getattr(target.get_output_embeddings(), "weight", None)
    is_dense = isinstance(weight, torch.Tensor) and weight.is_floating_point()
    if is_dense and weight.shape == (vocab_size, layer.hidden_size):
        with torch.no_grad():
            head.lm_head.weight.copy_(weight[head.target_ids.to(weight.device)])
    return head


def chosen_layers(target: PreTrainedModel, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    """The hidden states that a new head reads.

    Raises:
        ConfigError: one of them is not there.
        UnsupportedModelError: no head can read this target.
    """
    check_target(target, embedding_width=models.text_config(target.config).hidden_size)
    num_layers = int(models.text_config(target.config).num_hidden_layers)
    if layer_ids is None:
        return default_layer_ids(num_layers)
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) > num_layers:
        rule = f"must be different numbers from 0 to {num_layers}, the target's number of layers"
        raise ConfigError("layer_ids", rule, tuple(layer_ids), f"Use {default_layer_ids(num_layers)}.")
    return tuple(layer_ids)


def layer_config(config: PretrainedConfig, layer_class: type[PretrainedConfig]) -> PretrainedConfig:
    """One layer shaped as the target's, as far as its configuration says."""
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
    return layer_class(num_hidden_layers=1, tie_word_embeddings=False, **values)
