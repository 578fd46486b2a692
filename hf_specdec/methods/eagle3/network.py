"""EAGLE-3 heads: their shapes, read from any published form, and the network, after arXiv 2503.01840.

The forms describe one network: that of speculators, and the flat one of SafeAILab and SpecForge
(`architectures: ["LlamaForCausalLMEagle3"]`). It is decoder layers over a token's embedding and the state before it.
Knows nothing of trees, caches or targets: masks, positions and a cache are arguments. Attention, MLP, norms and rotary
embeddings are those of transformers' llama and qwen3.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.draft_head import PairHead, within
from hf_specdec.methods.common.head_files import write_head
from hf_specdec.methods.common.layer_head import MOST_DRAFT_TOKENS, HeadShape, LayerHead, layer_values, sizes_of

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_OF_LAYERS = {"architectures", "model_type", "draft_vocab_size", "target_hidden_size", "eagle_config", "auto_map"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3HeadConfig(HeadShape):
    """An EAGLE-3 head's shape.

    Further arguments are those of `HeadShape`.

    Args:
        norm_before_residual (`bool`): the first residual is the normalised state.
        norm_before_fc (`bool`): one norm over the concatenated hidden states.
        fc_norm (`bool`): a norm for each hidden state before they are concatenated.
        norm_output (`bool`): the normalised state is what the next draft step reads.
        target_name (`str`, *optional*): of the target that the head was trained for.
        target_architectures (`tuple[str, ...]`): of that target.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    label: ClassVar[str] = "an EAGLE-3 head"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3",)
    architectures: ClassVar[Mapping[str, str]] = {  # -> model type of the layers
        "LlamaForCausalLMEagle3": "llama",
        "Eagle3LlamaForCausalLM": "llama",
    }
    ids_field: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"

    def __post_init__(self) -> None:
        HeadShape.__post_init__(self)
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("fc_norm", "must be False with norm_before_fc", True, "A head has one of the two norms.")

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str, layer: dict[str, Any]) -> Self:
        model_type = layer.pop("model_type", "qwen3")
        if model_type not in CONFIGS:
            raise unknown_name("transformer_layer_config.model_type", model_type, CONFIGS)
        verifier = (values.get("speculators_config") or {}).get("verifier") or {}
        ids = values.get(cls.ids_field)
        return cls(
            **sizes_of(values, CONFIGS[model_type](**layer), MOST_DRAFT_TOKENS),
            layer_ids=None if ids is None else tuple(ids),
            target_name=verifier.get("name_or_path"),
            target_architectures=tuple(verifier.get("architectures") or ()),
            **{name: bool(values.get(name)) for name in FLAGS},
        )

    @classmethod
    def _from_flat(cls, values: Mapping[str, Any], kind: str) -> Self:
        of_layers = {name: value for name, value in values.items() if name not in NOT_OF_LAYERS}
        layer = CONFIGS[kind](**{"num_hidden_layers": 1} | of_layers)
        fields = {**values, **(values.get("eagle_config") or {})}
        ids = fields.get(cls.ids_field)
        flags: dict[str, Any] = {name: bool(fields.get(name)) for name in FLAGS}
        sizes = sizes_of(values, layer, layer.vocab_size)
        return cls(**sizes, layer_ids=None if ids is None else tuple(ids), **flags)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the speculators format, which vLLM reads too."""
        verifier = {"name_or_path": self.target_name, "architectures": list(self.target_architectures)}
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
            "transformer_layer_config": layer_values(self.layer),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": None if self.target_hidden_size == self.hidden_size else self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": None if self.layer_ids is None else list(self.layer_ids),
            **{name: getattr(self, name) for name in FLAGS},
            "tie_word_embeddings": False,
        }


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high hidden state of a target with `num_layers` layers.

    Heads whose files name none read 2, n // 2 and n - 3, which needs 8 layers. Smaller targets, for which no head is
    published, give 1, n // 2 and n - 1, and those of up to three layers their last three hidden states.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    return tuple(range(max(num_layers - 2, 0), num_layers + 1))


class Eagle3Head(LayerHead, PairHead):
    """A head that drafts from the target's hidden states.

    Args:
        config: its shape.
        has_embedding: whether it brings token embeddings; else it reads the target's.
    """

    methods = ("eagle3", "auto")
    shape_class = Eagle3HeadConfig

    def __init__(self, config: Eagle3HeadConfig, *, has_embedding: bool = False) -> None:
        super().__init__(config, has_embedding=has_embedding)
        norm_class, eps = type(self.norm), config.layer.rms_norm_eps
        width, count = config.target_hidden_size, config.num_features
        self.input_norm = norm_class(count * width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([norm_class(width, eps=eps) for _ in range(count)]) if config.fc_norm else None
        _read_two_inputs(self.layers[0], config.hidden_size, norm_class(config.hidden_size, eps=eps))
        self.has_window = any(_window_of(layer) is not None for layer in self.layers)

    @staticmethod
    def weight_name(name: str) -> str:
        """As of `LayerHead`; SafeAILab's `midlayer.` is `layers.0.`."""
        name = name.removeprefix("model.")
        return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name

    def cache_shapes(self, stage: int) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return self.layer_shapes

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers."""
        return default_layer_ids(num_layers) if self.config.layer_ids is None else self.config.layer_ids

    @property
    def target_ids(self) -> torch.Tensor:
        """`(draft_vocab_size,)`: the target's id of each draft id."""
        ids = super().target_ids
        return torch.arange(self.config.draft_vocab_size, device=self.device) if ids is None else ids

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """`(..., num_features * target_hidden_size)` hidden states of the target -> `(..., hidden_size)` states."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        key_positions: torch.Tensor | None = None,
        stage: int = 0,
    ) -> torch.Tensor:
        """See `PairHead.forward`; there is one stage."""
        rotary = self.rotary_emb(states, positions)
        for layer in self.layers:
            seen = within(_window_of(layer), mask, positions, key_positions)
            kwargs = {"attention_mask": seen, "position_embeddings": rotary, CACHE: cache}
            if layer is self.layers[0]:
                states = self._first_layer(layer, embeddings, states, kwargs)
            else:
                states = layer(states, position_ids=positions, **kwargs)
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab_size)` of states that `forward` returned."""
        logits: torch.Tensor = self.lm_head(states if self.config.norm_output else self.norm(states))
        return logits

    def _first_layer(
        self, layer: Any, embeddings: torch.Tensor, states: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """An ordinary decoder layer whose attention reads `(batch, Q, 2 * hidden_size)`."""
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        both = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        residual = residual + layer.self_attn(hidden_states=both, **kwargs)[0]
        out: torch.Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out


def _read_two_inputs(layer: Any, hidden_size: int, hidden_norm: nn.Module) -> None:
    """Let the layer's queries, keys and values read a token's embedding and a state side by side."""
    layer.hidden_norm = hidden_norm
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        setattr(attention, name, nn.Linear(2 * hidden_size, old.out_features, bias=old.bias is not None))


def _window_of(layer: Any) -> int | None:
    window: int | None = getattr(layer.self_attn, "sliding_window", None)
    return window


load_head = Eagle3Head.read


def save_head(head: Eagle3Head, folder: str | os.PathLike[str]) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors in the speculators format.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    weights = dict(head.state_dict())
    if head.d2t is not None:  # the same for who reads it by the target's ids
        is_drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        weights["t2d"] = is_drafted.index_fill(0, head.target_ids.cpu(), True)
    write_head(folder, head, head.config.to_dict(), weights)
