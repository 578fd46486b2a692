"""MTP layers read from a checkpoint of the target, as its family holds them.

Every family normalises the next token's embedding and the state before it apart, and projects the two, the embedding
first. They differ in the names of the weights and in the block.

Sources: the reference code of the families and its ports in vLLM and SGLang; `docs/guides/draft-model.md` names them.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.common.files import said_of_hub
from hf_specdec.compat.models import text_config
from hf_specdec.compat.mtp import (
    MtpModel,
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    has_own_mtp,
    weight_names,
    widening,
)
from hf_specdec.errors import CheckpointError, UnsupportedModelError, first_line

FULL, SLIDING = "full_attention", "sliding_attention"
SAME = "same"  # as the model's layer of the same number
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
NUMBERED = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\."  # after the model's own layers
QUANTISED = re.compile(r"\.(weight_scale(_2)?|weight_packed|qweight|scales|weight\.absmax)$")
OTHER_METHOD = 'Use another spec_method, such as "auto".'
REMEDY = "Name the original checkpoint: hf_specdec.AutoDraftHead.from_pretrained(path, target=model)."
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


def load_mtp(target: PreTrainedModel, path: str | None = None) -> MtpModel:
    """The MTP layers in a checkpoint of `target`.

    Args:
        path: folder or hub name; by default that which the target was loaded from.

    Raises:
        UnsupportedModelError: MTP layers of such a model are not known.
        CheckpointError: they are not there.
    """
    name, source, dtype = type(target).__name__, target.config.name_or_path, target.config.dtype
    mtp_class, announced = _class_for(target), announced_layers(target.config)
    if announced == 0:
        raise UnsupportedModelError(
            f"{name} must have a configuration that announces MTP layers, but this one announces 0. {OTHER_METHOD}"
        )
    if announced is not None:
        with _announcing(target, announced):  # what cannot be built is said before what cannot be read
            pass
    if not (path or source):
        raise CheckpointError(
            f"{name} must come from a checkpoint with the MTP layers of {name}, but it was loaded from none. {REMEDY}"
        )
    try:
        count = announced or _num_layers_in(path or source, target)
        with _announcing(target, count):
            _refuse_quantised(path or source, mtp_class.get_mtp_weights_regex(target))
            target.config.name_or_path = source if path is None else path
            target.config.dtype = target.dtype  # the loader wants one; a saved configuration names it by a string
            loaded: MtpModel = mtp_class.from_pretrained(target, device_map={"": target.device})
    except UnsupportedModelError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and path and not Path(path).exists():
            raise CheckpointError(f"{said_of_hub(path, first_line(error))} {REMEDY}") from error
        raise CheckpointError(
            f"{path or source!r} must be a checkpoint with the MTP layers of {name}, but it cannot be read as one: "
            f"{first_line(error)} {REMEDY}"
        ) from error
    finally:
        target.config.name_or_path, target.config.dtype = source, dtype
    return loaded.eval().requires_grad_(False)


def _class_for(target: PreTrainedModel) -> type[MtpModel]:
    """Finds the family's class, or transformers' own of a model that announces layers which it can find."""
    mtp_class: type[MtpModel] | None = None
    if family_of(target.config) is not None:
        mtp_class = FamilyMtp
    elif has_own_mtp(target):
        mtp_class = MtpModel
    if mtp_class is not None:
        return mtp_class
    text, reason = text_config(target.config), "has none"
    if hasattr(text, "hc_mult") or hasattr(text, "hc_count"):
        reason = "its own read the residual streams before they are joined, and transformers hands out the joined ones"
    elif hasattr(text, "index_topk"):
        reason = "its own choose keys by an index, whose keys no cache of drafts holds"
    raise UnsupportedModelError(
        f"{type(target).__name__} must be a model with MTP layers that can be read here, but {reason}. {OTHER_METHOD}"
    )


def _refuse_quantised(path: str, keys: re.Pattern[str]) -> None:
    """Raise a `ValueError` for MTP layers that are quantised otherwise than to FP8 with a `weight_scale_inv`."""
    names = [name for name in weight_names(path) if keys.search(name) and QUANTISED.search(name)]
    if names:
        raise ValueError(f"its MTP layers are quantised otherwise than to FP8 with weight_scale_inv ({names[0]}).")


def _num_layers_in(path: str, target: PreTrainedModel) -> int:
    """Counts the MTP layers of a checkpoint whose configuration does not say how many."""
    family = family_of(target.config)
    assert family is not None
    numbers = [int(match[1]) for name in weight_names(path) if (match := re.match(family.counted, name))]
    first = text_config(target.config).num_hidden_layers if family.counted == NUMBERED else 0
    count = max(numbers, default=-1) + 1 - first
    if count < 1:
        raise ValueError("it has no MTP layers.")
    return int(count)


@contextlib.contextmanager
def _announcing(target: PreTrainedModel, count: int) -> Iterator[None]:
    """Meanwhile the configuration tells how many MTP layers there are, and of which types."""
    config, family = text_config(target.config), family_of(target.config)
    fields: dict[str, Any] = {"num_mtp_layers": count}
    if family is not None:
        attention = _types(config, "layer_types", family.attention, count)
        mlp = _types(config, "mlp_layer_types", family.mlp, count)
        types = {"mtp_layer_types": attention, "mtp_mlp_layer_types": mlp}
        fields |= {name: value for name, value in types.items() if value}
    before = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    try:
        for name, value in fields.items():
            setattr(config, name, value)
        try:
            target.config.get_mtp_config()
        except ValueError as error:  # some configurations do not say of which type the layers are
            raise UnsupportedModelError(
                f"{type(target).__name__} must be a model whose MTP layers transformers can build, but it cannot: "
                f"{error}. {OTHER_METHOD}"
            ) from error
        yield
    finally:
        for name in fields:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


def _types(config: Any, name: str, otherwise: str | None, count: int) -> list[str] | None:
    """The types of `count` MTP layers: those that the configuration tells, or the family's."""
    types, mtp_types = getattr(config, name, None), getattr(config, f"mtp_{name}", None)
    if mtp_types is not None or not types:
        return mtp_types
    if otherwise is None:
        return None
    return list(types[:count]) if otherwise == SAME else [otherwise] * count
