"""Multi-token prediction layers as the checkpoints of each family of models have them.

Every family normalises the next token's embedding and the state before it apart, and projects the two, the embedding
first. They differ in the names of the weights and in the block.

Sources: the reference code of the families and its ports in vLLM and SGLang; `docs/guides/draft-model.md` names them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.compat.models import text_config
from hf_specdec.compat.mtp import (
    MtpModel,
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    widening,
)

FULL, SLIDING = "full_attention", "sliding_attention"
SAME = "same"  # as the model's layer of the same number
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
NUMBERED = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\."  # after the model's own layers
BELOW_MTP = r"^(?:model\.)?mtp\.layers\.(\d+)\."


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
    """

    keys: str
    counted: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention: str | None = FULL
    mlp: str = "sparse"


# `shared_head.norm` is the norm after the block, `shared_head.head` a copy of the model's output head
NUMBERED_FAMILY = MtpFamily(keys=NUMBERED, counted=NUMBERED)
FINAL_NORM = {r"\.final_layernorm\.": ".post_norm."}
NUMBERED_FINAL_NORM = dataclasses.replace(NUMBERED_FAMILY, names=FINAL_NORM)
# `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.norm` besides the blocks
ONE_NECK = MtpFamily(keys=r"^mtp\.", counted=BELOW_MTP)

FAMILIES: Mapping[str, MtpFamily] = {
    "bailing_hybrid": NUMBERED_FINAL_NORM,
    "deepseek_v3": NUMBERED_FAMILY,
    "exaone4_5": dataclasses.replace(ONE_NECK, attention=SAME),
    "exaone_moe": dataclasses.replace(ONE_NECK, attention=SAME, mlp="dense"),
    "glm4_moe": NUMBERED_FAMILY,
    "glm4_moe_lite": NUMBERED_FAMILY,
    "glm_ocr": NUMBERED_FAMILY,
    "hy_v3": NUMBERED_FINAL_NORM,
    "kimi_k25": NUMBERED_FAMILY,
    "mellum": dataclasses.replace(ONE_NECK, attention=None),
    "mimo_v2_flash": MtpFamily(
        keys=r"^model\.mtp\.",
        counted=BELOW_MTP,
        names=FINAL_NORM | {r"\.pre_mlp_layernorm\.": ".post_attention_layernorm."},
        attention=SLIDING,
        mlp="dense",
    ),
    "qwen3_5": ONE_NECK,
    "qwen3_5_moe": ONE_NECK,
    "qwen3_5_moe_text": ONE_NECK,
    "qwen3_5_text": ONE_NECK,
    "qwen3_next": ONE_NECK,
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


class FamilyMtp(MtpModel):
    """`MtpModel` of a family whose layers differ from what transformers knows of them."""

    def __init__(self, main_model: PreTrainedModel, num_mtp_layers: int) -> None:
        super().__init__(main_model, num_mtp_layers)
        self.family = _family(main_model)
        config = self.config
        norm = type(main_model.get_decoder().norm) if hasattr(main_model.get_decoder(), "norm") else None
        for layer in self.layers:
            if norm is not None and type(layer.enorm) is not norm:
                # transformers takes the first norm inside the last layer, which may be a part of its mixer
                layer.enorm, layer.hnorm, layer.post_norm = (
                    norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
                )

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """See `MtpModel`."""
        family, text = _family(main_model), text_config(main_model.config)
        if family.keys != NUMBERED:
            return re.compile(family.keys)
        first = text.num_hidden_layers
        numbers = "|".join(str(first + place) for place in range(text.num_mtp_layers))
        return re.compile(NUMBERED.replace(r"\d+", numbers))

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[Any]:
        """See `MtpModel`; it finds its own mapping by the name of its class."""
        count, family = len(self.layers), self.family
        first = main_model.config.get_text_config().num_hidden_layers
        names = {r"^model\.language_model\.": "model.", r"^language_model\.": "", **family.names}
        for place in range(count):
            names[rf"layers\.{first + place}\."] = f"layers.{place}.mtp_block."
        renamings = [WeightRenaming(source_patterns=source, target_patterns=target) for source, target in names.items()]
        # those of a composite model's decoder apply below its name alone
        kinds = {
            "MtpModel": renamings,
            text_config(main_model.config).model_type: get_model_conversion_mapping(main_model),
        }
        conversions: list[Any] = []
        for kind, before in kinds.items():
            conversions += [*before, *(get_checkpoint_conversion_mapping(kind) or ())]
        return widening(conversions, self)


def _family(model: PreTrainedModel) -> MtpFamily:
    family = family_of(model.config)
    assert family is not None
    return family
