"""Shape of a DFlash or DFlash 2 head, in either of their published forms.

The authors' form has fields of its own next to those of the layers or in a `dflash_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import AttentionSpan
from hf_specdec.methods.common.head_shape import MOST_DRAFT_TOKENS, REMEDY, HeadShape, sizes_of

SLIDING = "sliding_attention"
# fields of networks that compute something else: the value with which nothing else is computed
UNKNOWN: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "fc_layernorm": False,
    "is_neox_style": True,
    "use_aux_hidden_state": True,
}
ALL = AttentionSpan()


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashHeadConfig(HeadShape):
    """A DFlash head's shape; its layers are those of qwen3.

    Further arguments are those of `HeadShape`.

    Args:
        block_size (`int`): tokens of a block, the last token of the text among them.
        mask_token_id (`int`): in the place of a token to be drafted.
        span, sliding_span: how far the tokens of a block see, in layers without and with a sliding window.
        drafts_at_root (`bool`): the state of the last token drafts the next one, instead of the first mask's.
        conv_kernel_size, conv_group_size (`int`): of DFlash 2's convolutions, 0 without.
        selector_rank, selector_top_k (`int`): of DFlash 2, width and number of the candidates that are scored by the
            token before, 0 without.
    """

    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    span: AttentionSpan = ALL
    sliding_span: AttentionSpan | None = None
    drafts_at_root: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    label: ClassVar[str] = "a DFlash head"
    kinds: ClassVar[tuple[str, ...]] = ("dflash", "dflash2")
    architectures: ClassVar[Mapping[str, str]] = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
    ids_field: ClassVar[str] = "target_layer_ids"

    def __post_init__(self) -> None:
        HeadShape.__post_init__(self)
        if self.block_size < 2 - self.drafts_at_root:
            raise ConfigError("block_size", "must leave room for a drafted token", self.block_size, REMEDY)
        if self.mask_token_id < 0:
            raise ConfigError("mask_token_id", "must be a token of the target", self.mask_token_id, REMEDY)
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            rule = f"must divide hidden_size {self.hidden_size}"
            raise ConfigError("conv_group_size", rule, self.conv_group_size, REMEDY)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a config.json.

        Raises:
            ConfigError: it describes no DFlash head, or one of a kind that is not known.
        """
        fields = {**values, **(values.get("dflash_config") or {})}
        for field, usual in UNKNOWN.items():
            if fields.get(field, usual) != usual:
                raise ConfigError(field, f"must be {usual}", fields[field], "Such heads are not read.")
        return super(DFlashHeadConfig, cls).from_dict(fields)

    @classmethod
    def _from_flat(cls, values: Mapping[str, Any], kind: str) -> Self:
        layer = _layers(values)
        ids = values.get(cls.ids_field)
        if ids is None:
            ids = _usual_layers(_required(values, "num_target_layers"), layer.num_hidden_layers)
        window, is_causal = values.get("sliding_window"), values.get("is_causal", values.get("causal"))
        if values.get("use_swa"):
            window = values.get("swa_window_size", window)
            if SLIDING not in layer.layer_types:
                layer.layer_types = [SLIDING] * layer.num_hidden_layers
        return cls(
            **sizes_of(values, layer, layer.vocab_size),
            layer_ids=tuple(layer_id + 1 for layer_id in ids),  # it counts layers from 0
            block_size=_required(values, "block_size"),
            span=AttentionSpan(None, 0) if is_causal else ALL,
            sliding_span=_sliding_span(layer, window, is_causal=is_causal is None or bool(is_causal)),
            **_of_both_forms(values, kind),
        )

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str, layer: dict[str, Any]) -> Self:
        config, window = _layers(layer), layer.get("sliding_window")
        is_causal = not values.get("sliding_window_non_causal", kind == "dflash2")
        return cls(
            **sizes_of(values, config, MOST_DRAFT_TOKENS),
            layer_ids=tuple(_required(values, "aux_hidden_state_layer_ids")),
            block_size=values.get("block_size") or 8,
            sliding_span=_sliding_span(config, window, is_causal=is_causal, from_root=True),
            **_of_both_forms(values, kind),
        )


def _of_both_forms(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fields of a `DFlashHeadConfig` that both forms name alike."""
    usual: dict[str, Any] = {}
    if kind == "dflash2":
        usual = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return {
        "mask_token_id": _required(values, "mask_token_id"),
        "drafts_at_root": bool(values.get("sample_from_anchor")),
        **{field: values.get(field, value) for field, value in usual.items()},
    }


def _layers(values: Mapping[str, Any]) -> PretrainedConfig:
    """The layers' configuration; whatever model they are for, they are those of qwen3."""
    return CONFIGS["qwen3"](**{name: value for name, value in values.items() if name not in ("model_type", "auto_map")})


def _required(values: Mapping[str, Any], field: str) -> Any:
    if values.get(field) is None:
        raise ConfigError(field, "must be given", values.get(field), REMEDY)
    return values[field]


def _usual_layers(num_layers: int, count: int) -> list[int]:
    """Layers of a target that a head reads whose file names none, evenly from the second to the last but two."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (count - 1)) for place in range(count)]


def _sliding_span(
    layer: PretrainedConfig, window: int | None, *, is_causal: bool, from_root: bool = False
) -> AttentionSpan | None:
    """Window of the layers with a sliding one; `None` where there are none. `window` counts a token itself."""
    if SLIDING not in layer.layer_types:
        return None
    if window is None:
        raise ConfigError("sliding_window", "must be given for layers of sliding_attention", None, REMEDY)
    if from_root:
        return AttentionSpan(window, 0 if is_causal else None, from_root=True)
    return AttentionSpan(window - 1, 0 if is_causal else window - 1)
