"""The EAGLE-3 network: decoder layers over a token's embedding and the state before it, after arXiv 2503.01840.

Knows nothing of trees, caches or targets: masks, positions and a cache are given. Attention, MLP, norms and rotary
embeddings are those of transformers' llama and qwen3.
"""

import os
from typing import Any

import torch
from torch import nn

from hf_specdec.compat.caches import CACHE
from hf_specdec.methods.common.draft_head import PairHead, within
from hf_specdec.methods.common.head_files import write_head
from hf_specdec.methods.common.layer_head import LayerHead
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig, default_layer_ids


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
