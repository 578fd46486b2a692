"""DFlash heads: their shapes, in either published form, and the network, after https://arxiv.org/abs/2602.06036.

The network is decoder layers over a block of masks, which also attend to states of the target; layers, norms and rotary
embeddings are those of transformers' qwen3. Knows nothing of trees or targets: masks, positions and a cache are
arguments. The authors' form of a shape has fields of its own next to those of the layers or in a `dflash_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import CONFIGS, attend, rotated
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import AttentionSpan, BlockHead
from hf_specdec.methods.common.head_files import HeadFiles, read_tensors
from hf_specdec.methods.common.layer_head import MOST_DRAFT_TOKENS, REMEDY, HeadShape, LayerHead, sizes_of

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
MASK_EMBEDDING = "mask_embedding.pt"
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


class DFlashHead(LayerHead, BlockHead):
    """A head that drafts a block of tokens from the target's hidden states.

    Args:
        config: its shape.
        has_embedding: whether it brings token embeddings; else it reads the target's.
        has_output_head: whether it brings an output head; else the target's reads its states.
        has_mask_embedding: whether the mask has an embedding besides those of the tokens.
    """

    methods = ("dflash", "auto")
    shape_class = DFlashHeadConfig
    parts: ClassVar[Mapping[str, str]] = {
        **LayerHead.parts,
        "has_output_head": "lm_head.weight",
        "has_mask_embedding": "mask_embedding",
    }

    def __init__(
        self,
        config: DFlashHeadConfig,
        *,
        has_embedding: bool = False,
        has_output_head: bool = False,
        has_mask_embedding: bool = False,
    ) -> None:
        if config.draft_vocab_size < config.vocab_size and not has_output_head:
            rule = f"must be the target's {config.vocab_size} without lm_head.weight"
            raise ConfigError("draft_vocab_size", rule, config.draft_vocab_size, REMEDY)
        super().__init__(config, has_embedding=has_embedding, has_output_head=has_output_head)
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.span, self.sliding_span = config.span, config.sliding_span
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if has_mask_embedding else None
        self.hidden_norm = type(self.norm)(config.hidden_size, eps=config.layer.rms_norm_eps)

    @staticmethod
    def more_weights(files: HeadFiles) -> dict[str, torch.Tensor]:
        """The mask's embedding, where it has a file of its own."""
        if (file := files.find(MASK_EMBEDDING)) is None:
            return {}
        content: Any = read_tensors(file)
        return {"mask_embedding": (content["embedding"] if isinstance(content, dict) else content).reshape(-1)}

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that the configuration names."""
        ids: tuple[int, ...] = self.config.layer_ids
        return ids

    def cache_shapes(self) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return self.layer_shapes

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        sliding_mask: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """See `BlockHead.forward`; N may be several blocks, which the masks keep apart."""
        states = embeddings
        if self.mask_embedding is not None:
            is_mask = torch.arange(states.shape[1], device=states.device) % self.block_size > 0
            states = torch.where(is_mask[:, None], self.mask_embedding.to(states.dtype), states)
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary_emb(states, positions)
        layer: Any
        for layer, kind in zip(self.layers, self.config.layer.layer_types, strict=True):
            seen = sliding_mask if kind == SLIDING else mask
            read = partial(_attention, layer.self_attn, context=context, rotary=rotary, mask=seen, cache=cache)
            states = states + read(layer.input_layernorm(states))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        normed: torch.Tensor = self.norm(states)
        return normed


def _attention(
    attention: Any,
    states: torch.Tensor,
    *,
    context: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """Attention of a block's tokens to one another and to the target's new states, `context`."""
    width, heads = states.shape[1], (-1, attention.head_dim)
    both = torch.cat([context, states], dim=1)  # (batch, C + N, hidden_size)
    queries = attention.q_norm(attention.q_proj(states).unflatten(-1, heads)).transpose(1, 2)
    keys = attention.k_norm(attention.k_proj(both).unflatten(-1, heads)).transpose(1, 2)
    values = attention.v_proj(both).unflatten(-1, heads).transpose(1, 2)
    cosine, sine = rotary
    queries = rotated(queries, cosine[:, -width:], sine[:, -width:])
    # (batch, heads, K, head_dim), which `mask`, (batch, 1, N, K), is of
    keys, values = cache.update(rotated(keys, cosine, sine), values, attention.layer_idx)
    mixed = attend(attention, queries, keys, values, mask)  # (batch, N, heads, head_dim)
    out: torch.Tensor = attention.o_proj(mixed.flatten(-2))
    return out
