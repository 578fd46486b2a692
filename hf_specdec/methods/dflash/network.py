"""The DFlash network: decoder layers over a block of masks, which also attend to states of the target.

After https://arxiv.org/abs/2602.06036. Knows nothing of trees or targets: masks, positions and a cache are given.
Layers, norms and rotary embeddings are those of transformers' qwen3.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from hf_specdec.compat.decoder_layers import attend, rotated
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import BlockHead
from hf_specdec.methods.common.head_files import HeadFiles, read_tensors
from hf_specdec.methods.common.layer_head import REMEDY, LayerHead
from hf_specdec.methods.dflash.head_config import SLIDING, DFlashHeadConfig

MASK_EMBEDDING = "mask_embedding.pt"


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
