"""Shape of a DFlash head, in either of the published forms.

The authors' form has fields of its own next to those of the layers or in a `dflash_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import AttentionSpan
from hf_specdec.methods.common.layer_head import MOST_DRAFT_TOKENS, REMEDY, HeadShape, sizes_of

SLIDING = "sliding_attention"
# fields of networks that compute something else: the value with which nothing else is computed
UNKNOWN: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "fc_layernorm": False,
    "is_neox_style": True,
    "sample_from_anchor": False,
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
    """

    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    span: AttentionSpan = ALL
    sliding_span: AttentionSpan | None = None

    label: ClassVar[str] = "a DFlash head"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)
    architectures: ClassVar[Mapping[str, str]] = {"DFlashDraftModel": "dflash"}
    ids_field: ClassVar[str] = "target_layer_ids"

    def __post_init__(self) -> None:
        HeadShape.__post_init__(self)
        if self.block_size < 2:
            raise ConfigError("block_size", "must leave room for a drafted token", self.block_size, REMEDY)
        if self.mask_token_id < 0:
            raise ConfigError("mask_token_id", "must be a token of the target", self.mask_token_id, REMEDY)

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
            mask_token_id=_required(values, "mask_token_id"),
        )

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str, layer: dict[str, Any]) -> Self:
        config, window = _layers(layer), layer.get("sliding_window")
        is_causal = not values.get("sliding_window_non_causal")
        return cls(
            **sizes_of(values, config, MOST_DRAFT_TOKENS),
            layer_ids=tuple(_required(values, "aux_hidden_state_layer_ids")),
            block_size=values.get("block_size") or 8,
            sliding_span=_sliding_span(config, window, is_causal=is_causal, from_root=True),
            mask_token_id=_required(values, "mask_token_id"),
        )


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
