"""Configuration of a DFlash head, of DFlash and DFlash 2, in either of their published forms.

That of the methods' authors is the flat configuration of the head's layers, with an architecture's name and the other
fields, also in a `dflash_config`. That of speculators nests the layers' configuration. The networks are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.draft_head import AttentionSpan
from hf_specdec.methods.common.head_files import layer_values

ARCHITECTURES = {  # of the authors' form -> the kind
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
}
KINDS = ("dflash", "dflash2")
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
REMEDY = "Take config.json as it was published, or another head."


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashHeadConfig:
    """A DFlash head's shape.

    Args:
        layer (`PretrainedConfig`): of the decoder layers, of qwen3; its `vocab_size` is the target's.
        block_size (`int`): tokens of a block, the last token of the text among them.
        mask_token_id (`int`): in the place of a token to be drafted.
        layer_ids (`tuple[int, ...]`): hidden states that the head reads, as `output_hidden_states` numbers them: 0 the
            embeddings, n the last one.
        draft_vocab_size (`int`): tokens that the head can draft.
        target_hidden_size (`int`): width of one hidden state of the target.
        span, sliding_span: how far the tokens of a block see, in layers without and with a sliding window.
        drafts_at_root (`bool`): the state of the last token drafts the next one, instead of the first mask's.
        conv_kernel_size, conv_group_size (`int`): of DFlash 2's convolutions, 0 without.
        selector_rank, selector_top_k (`int`): of DFlash 2, width and number of the candidates that are scored by the
            token before, 0 without.
    """

    layer: PretrainedConfig
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    target_hidden_size: int
    span: AttentionSpan = ALL
    sliding_span: AttentionSpan | None = None
    drafts_at_root: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 2 - self.drafts_at_root:
            raise ConfigError("block_size", "must leave room for a drafted token", self.block_size, REMEDY)
        if not 0 < self.draft_vocab_size <= self.layer.vocab_size:
            rule = f"must be from 1 to the target's vocab_size {self.layer.vocab_size}"
            raise ConfigError("draft_vocab_size", rule, self.draft_vocab_size, REMEDY)
        if self.mask_token_id < 0:
            raise ConfigError("mask_token_id", "must be a token of the target", self.mask_token_id, REMEDY)
        ids = self.layer_ids
        if not ids or min(ids) < 0 or len(set(ids)) != len(ids):
            raise ConfigError("target_layer_ids", "must be different numbers from 0 on", ids, REMEDY)
        if self.conv_group_size and self.layer.hidden_size % self.conv_group_size:
            rule = f"must divide hidden_size {self.layer.hidden_size}"
            raise ConfigError("conv_group_size", rule, self.conv_group_size, REMEDY)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DFlashHeadConfig":
        """Read a config.json.

        Raises:
            ConfigError: it describes no DFlash head, or one of a kind that is not known.
        """
        own = {**values, **(values.get("dflash_config") or {})}
        for field, usual in UNKNOWN.items():
            if own.get(field, usual) != usual:
                raise ConfigError(field, f"must be {usual}", own[field], "Such heads are not read.")
        kind = values.get("speculators_model_type")
        if kind is not None:
            if kind not in KINDS:
                raise unknown_name("speculators_model_type", kind, KINDS)
            return cls._from_speculators(values, kind)
        kind = _flat_kind(values)
        if kind is None:
            rule = f"must name {' or '.join(ARCHITECTURES)}, or speculators_model_type must be {' or '.join(KINDS)}"
            raise ConfigError("architectures", rule, values.get("architectures"), "Choose the folder of a DFlash head.")
        return cls._from_flat(own, kind)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the authors' form, for DFlash heads without sliding windows."""
        own = {"mask_token_id": self.mask_token_id, "target_layer_ids": [layer - 1 for layer in self.layer_ids]}
        values = {**layer_values(self.layer), "block_size": self.block_size}
        return {"architectures": ["DFlashDraftModel"], **values, "dflash_config": own}

    @classmethod
    def _from_flat(cls, values: Mapping[str, Any], kind: str) -> "DFlashHeadConfig":
        """Fields of the authors' form, those of its `dflash_config` among them."""
        layer = _layers(values)
        ids = values.get("target_layer_ids")
        if ids is None:
            ids = _usual_layers(_required(values, "num_target_layers"), layer.num_hidden_layers)
        window, is_causal = values.get("sliding_window"), values.get("is_causal", values.get("causal"))
        if values.get("use_swa"):
            window = values.get("swa_window_size", window)
            if SLIDING not in layer.layer_types:
                layer.layer_types = [SLIDING] * layer.num_hidden_layers
        return cls(
            layer=layer,
            layer_ids=tuple(layer_id + 1 for layer_id in ids),  # it counts layers from 0
            block_size=_required(values, "block_size"),
            draft_vocab_size=values.get("draft_vocab_size") or layer.vocab_size,
            span=AttentionSpan(None, 0) if is_causal else ALL,
            sliding_span=_sliding_span(layer, window, is_causal=is_causal is None or bool(is_causal)),
            **_of_both_forms(values, layer, kind),
        )

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str) -> "DFlashHeadConfig":
        nested = values.get("transformer_layer_config")
        if not nested:  # the sizes would be transformers' defaults, those of a large model
            rule = "must be the configuration of the head's layers"
            raise ConfigError("transformer_layer_config", rule, nested, REMEDY)
        layer = _layers(nested)
        is_causal = not values.get("sliding_window_non_causal", kind == "dflash2")
        return cls(
            layer=layer,
            layer_ids=tuple(_required(values, "aux_hidden_state_layer_ids")),
            block_size=values.get("block_size") or 8,
            draft_vocab_size=values.get("draft_vocab_size") or 32000,
            sliding_span=_sliding_span(layer, nested.get("sliding_window"), is_causal=is_causal, from_root=True),
            **_of_both_forms(values, layer, kind),
        )


def is_head_config(values: Mapping[str, Any]) -> bool:
    """True if a config.json is that of a DFlash head."""
    return values.get("speculators_model_type") in KINDS or _flat_kind(values) is not None


def _flat_kind(values: Mapping[str, Any]) -> str | None:
    """Finds the variant that the architecture's name gives, if any."""
    return next((ARCHITECTURES[name] for name in values.get("architectures") or [] if name in ARCHITECTURES), None)


def _of_both_forms(values: Mapping[str, Any], layer: PretrainedConfig, kind: str) -> dict[str, Any]:
    """Fields of a `DFlashHeadConfig` that both forms name alike."""
    found = {
        "mask_token_id": _required(values, "mask_token_id"),
        "target_hidden_size": values.get("target_hidden_size") or layer.hidden_size,
        "drafts_at_root": bool(values.get("sample_from_anchor")),
    }
    usual: dict[str, Any] = {}
    if kind == "dflash2":
        usual = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return found | {field: values.get(field, value) for field, value in usual.items()}


def _layers(values: Mapping[str, Any]) -> PretrainedConfig:
    """The layers' configuration; whatever model they are for, they are those of qwen3."""
    return CONFIGS["qwen3"](**{name: value for name, value in values.items() if name not in ("model_type", "auto_map")})


def _required(values: Mapping[str, Any], field: str) -> Any:
    if values.get(field) is None:
        raise ConfigError(field, "must be given", values.get(field), REMEDY)
    return values[field]


def _usual_layers(num_layers: int, num_own: int) -> list[int]:
    """Layers of a target that a head reads whose file names none, evenly from the second to the last but two."""
    if num_own == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (num_own - 1)) for place in range(num_own)]


def _sliding_span(
    layer: PretrainedConfig, window: int | None, *, is_causal: bool, from_root: bool = False
) -> AttentionSpan | None:
    """Window of the layers with a sliding one; `None` where there are none.

    Args:
        window: tokens that each sees, its own counted; or states of the target that all tokens of a block see.
    """
    if SLIDING not in layer.layer_types:
        return None
    if window is None:
        raise ConfigError("sliding_window", "must be given for layers of sliding_attention", None, REMEDY)
    if from_root:
        return AttentionSpan(window, 0 if is_causal else None, from_root=True)
    return AttentionSpan(window - 1, 0 if is_causal else window - 1)
