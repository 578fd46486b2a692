"""Layouts of multi-token prediction layers in the checkpoints of each family of models.

Every family normalises the next token's embedding and the state before it apart, and projects the two, the embedding
first. They differ in the names of the weights, in the block, and in what follows it.

Sources: the reference code of the families and its ports in vLLM and SGLang; `docs/guides/draft-model.md` names them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_specdec.compat.models import text_config

FULL, SLIDING = "full_attention", "sliding_attention"
SAME = "same"  # as the model's layer of the same number
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
NUMBERED = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\."  # after the model's own layers
BELOW_MTP = r"^(?:model\.)?mtp\.layers\.(\d+)\."


def _nothing(config: Any, attention: Sequence[str]) -> Mapping[str, Any]:
    return {}


def _ernie(config: Any, attention: Sequence[str]) -> Mapping[str, Any]:
    """A dense block."""
    return {"moe_layer_start_index": 1 << 30}


def _nemotron(config: Any, attention: Sequence[str]) -> Mapping[str, Any]:
    """Its configuration names the epsilon otherwise."""
    return {"rms_norm_eps": config.layer_norm_epsilon}


def _step(config: Any, attention: Sequence[str]) -> Mapping[str, Any]:
    """Layers that slide have another number of heads."""
    heads = {"num_attention_heads": config.num_sliding_attention_heads}
    return {"mtp_per_layer_config": {place: heads for place, kind in enumerate(attention) if kind == SLIDING}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """Layout of MTP layers in one family's checkpoints.

    Attributes:
        keys (`str`): regular expression of their weights' names.
        counted (`str`): regular expression whose group is a layer's number, where the configuration announces none.
        names (`Mapping[str, str]`): names that transformers' loader does not know, as regular expressions, and its own.
        attention (`str | None`): type of the layers' attention where the configuration does not tell; `SAME` is that of
            the model's layer with the same number. `None`: the configuration must tell.
        mlp (`str`): `"sparse"` or `"dense"`, likewise.
        fields (`Callable[[Any, Sequence[str]], Mapping[str, Any]]`): of the text configuration and the layers' types of
            attention, further fields of the configuration that the layers are built with.
        has_norm (`bool`): whether a norm follows the block.
        chains_norm (`bool`): whether the next layer reads the state after that norm, or before it.
        has_heads (`bool`): whether each layer has an output head of its own.
        halves (`bool`): whether the model's layers have two attentions, and an MTP layer the first half of one.
        blocks_field (`str | None`): field of the configuration that lists the types of the blocks of one MTP layer,
            where it has several; they are numbered on in the checkpoint.
    """

    keys: str
    counted: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention: str | None = FULL
    mlp: str = "sparse"
    fields: Callable[[Any, Sequence[str]], Mapping[str, Any]] = _nothing
    has_norm: bool = True
    chains_norm: bool = True
    has_heads: bool = False
    halves: bool = False
    blocks_field: str | None = None


# `shared_head.norm` is the norm after the block, `shared_head.head` a copy of the model's output head
NUMBERED_FAMILY = MtpFamily(keys=NUMBERED, counted=NUMBERED)
FINAL_NORM = {r"\.final_layernorm\.": ".post_norm."}
NUMBERED_FINAL_NORM = dataclasses.replace(NUMBERED_FAMILY, names=FINAL_NORM)
# `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.norm` besides the blocks
ONE_NECK = MtpFamily(keys=r"^mtp\.", counted=BELOW_MTP)

FAMILIES: Mapping[str, MtpFamily] = {
    "bailing_hybrid": NUMBERED_FINAL_NORM,
    "deepseek_v3": NUMBERED_FAMILY,
    "ernie4_5_moe": MtpFamily(
        keys=r"^model\.mtp_",
        counted=r"^model\.mtp_block\.(\d+)\.",
        names={
            r"^model\.mtp_emb_norm\.(\d+)\.": r"layers.\1.enorm.",
            r"^model\.mtp_hidden_norm\.(\d+)\.": r"layers.\1.hnorm.",
            r"^model\.mtp_linear_proj\.(\d+)\.": r"layers.\1.eh_proj.",
            r"^model\.mtp_block\.(\d+)\.": r"layers.\1.mtp_block.",
        },
        fields=_ernie,
        has_norm=False,
    ),
    "exaone4_5": dataclasses.replace(ONE_NECK, attention=SAME),
    "exaone_moe": dataclasses.replace(ONE_NECK, attention=SAME, mlp="dense"),
    "glm4_moe": NUMBERED_FAMILY,
    "glm4_moe_lite": NUMBERED_FAMILY,
    "glm_ocr": NUMBERED_FAMILY,
    "hy_v3": NUMBERED_FINAL_NORM,
    "kimi_k25": NUMBERED_FAMILY,
    "longcat_flash": MtpFamily(
        keys=r"^model\.mtp\.",
        counted=BELOW_MTP,
        names={r"\.(enorm|hnorm)\.m\.": r".\1.", r"\.transformer_layer\.": "."},
        halves=True,
    ),
    "mellum": dataclasses.replace(ONE_NECK, attention=None),
    "mimo_v2_flash": MtpFamily(
        keys=r"^model\.mtp\.",
        counted=BELOW_MTP,
        names=FINAL_NORM | {r"\.pre_mlp_layernorm\.": ".post_attention_layernorm."},
        attention=SLIDING,
        mlp="dense",
    ),
    "nemotron_h": MtpFamily(keys=r"^mtp\.", counted=BELOW_MTP, fields=_nemotron, blocks_field="mtp_layers_block_type"),
    "qwen3_5": ONE_NECK,
    "qwen3_5_moe": ONE_NECK,
    "qwen3_5_moe_text": ONE_NECK,
    "qwen3_5_text": ONE_NECK,
    "qwen3_next": ONE_NECK,
    "step3p7": dataclasses.replace(
        NUMBERED_FAMILY,
        names={r"\.transformer\.shared_head\.": ".shared_head."},
        attention=None,
        fields=_step,
        chains_norm=False,
        has_heads=True,
    ),
}


def family_of(config: Any) -> MtpFamily | None:
    """The family of a model's configuration; `None` where its MTP layers are not known."""
    return FAMILIES.get(config.model_type) or FAMILIES.get(text_config(config).model_type)


def announced_layers(config: Any) -> int | None:
    """MTP layers that a configuration announces; `None` where it says nothing."""
    text = text_config(config)
    for name in COUNTS:
        count = getattr(text, name, None)
        if count is not None:
            return int(count)
    return None
