"""The EAGLE-3 network: decoder layers over a token's embedding and the state before it, after arXiv 2503.01840.

Knows nothing of trees, caches or targets: masks, positions and a cache are given. Attention, MLP, norms and rotary
embeddings are those of transformers' llama and qwen3.
"""

from typing import Any

import torch
from torch import nn

from hf_specdec.compat import CACHE
from hf_specdec.compat.decoder_layers import LAYERS, config_of_layers
from hf_specdec.methods.common.draft_head import PairHead, attention_shape, within
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig, default_layer_ids


class Eagle3Head(PairHead):
    """A head that drafts from the target's hidden states.

    Args:
        config: its shape.
        has_embedding: whether it brings token embeddings of its own; else it reads the target's.

    Attributes:
        embed_tokens (`nn.Embedding | None`): `(vocab_size, hidden_size)`.
        d2t (`Tensor | None`): `(draft_vocab_size,)`, what is added to a draft id to make it the target's; `None` where
            both vocabularies are the same.
    """

    methods = ("eagle3", "auto")

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: Eagle3HeadConfig, *, has_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        layer_config = config_of_layers(config.layer)
        layer_class, norm_class, rotary_class = LAYERS[layer_config.model_type]
        hidden_size, eps, width = config.hidden_size, layer_config.rms_norm_eps, config.target_hidden_size
        self.vocab_size, self.hidden_size, self.target_hidden_size = config.vocab_size, hidden_size, width
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size) if has_embedding else None
        self.fc = nn.Linear(config.num_features * width, hidden_size, bias=False)
        self.input_norm = norm_class(config.num_features * width, eps=eps) if config.norm_before_fc else None
        norms = [norm_class(width, eps=eps) for _ in range(config.num_features)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([layer_class(layer_config, i) for i in range(layer_config.num_hidden_layers)])
        _read_two_inputs(self.layers[0], layer_config, norm_class(hidden_size, eps=eps))
        self.num_layers = len(self.layers)
        self.has_window = any(_window_of(layer) is not None for layer in self.layers)
        self.norm = norm_class(hidden_size, eps=eps)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = rotary_class(layer_config)
        is_reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if is_reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if is_reduced else None)

    def like(self, config: Eagle3HeadConfig) -> "Eagle3Head":
        """A new head of another shape with the parts that this one has."""
        return Eagle3Head(config, has_embedding=self.embed_tokens is not None)

    def cache_shapes(self, stage: int) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return dict.fromkeys(range(self.num_layers), attention_shape(self.config.layer))

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers."""
        return default_layer_ids(num_layers) if self.config.layer_ids is None else self.config.layer_ids

    @property
    def target_ids(self) -> torch.Tensor:
        """`(draft_vocab_size,)`: the target's id of each draft id."""
        own = torch.arange(self.config.draft_vocab_size, device=self.device)
        return own if self.d2t is None else own + self.d2t

    def set_target_ids(self, ids: torch.Tensor) -> None:
        """Draft the tokens `ids`, `(draft_vocab_size,)` of the target's, ascending."""
        assert self.d2t is not None and self.t2d is not None
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids.to(self.t2d.device)] = True

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
            given = {"attention_mask": seen, "position_embeddings": rotary, CACHE: cache}
            if layer is self.layers[0]:
                states = self._first_layer(layer, embeddings, states, given)
            else:
                states = layer(states, position_ids=positions, **given)
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab_size)` of states that `forward` returned."""
        logits: torch.Tensor = self.lm_head(states if self.config.norm_output else self.norm(states))
        return logits

    def _first_layer(
        self, layer: Any, embeddings: torch.Tensor, states: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """An ordinary decoder layer whose attention reads `(batch, Q, 2 * hidden_size)`."""
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        both = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        residual = residual + layer.self_attn(hidden_states=both, **given)[0]
        out: torch.Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out


def _read_two_inputs(layer: Any, config: Any, hidden_norm: nn.Module) -> None:
    """Let the layer's queries, keys and values read a token's embedding and a state side by side."""
    layer.hidden_norm = hidden_norm
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        setattr(attention, name, nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None))


def _window_of(layer: Any) -> int | None:
    window: int | None = getattr(layer.self_attn, "sliding_window", None)
    return window
