"""The DFlash network: decoder layers over a block of masks, which also attend to states of the target.

After https://arxiv.org/abs/2602.06036. Knows nothing of trees or targets: masks, positions and a cache are given.
Layers, norms and rotary embeddings are those of transformers' qwen3.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_specdec.compat.decoder_layers import LAYERS, attend, config_of_layers, rotated
from hf_specdec.methods.common.draft_head import BlockHead, attention_shape
from hf_specdec.methods.dflash.convolution import BlockConvolution
from hf_specdec.methods.dflash.head_config import SLIDING, DFlashHeadConfig
from hf_specdec.methods.dflash.predecessor import CandidateSelector


class DFlashHead(BlockHead):
    """A head that drafts a block of tokens from the target's hidden states.

    Args:
        config: its shape.
        has_embedding: whether it brings token embeddings of its own; else it reads the target's.
        has_output_head: whether it brings an output head of its own.
        has_mask_embedding: whether the mask has an embedding besides those of the tokens.

    Attributes:
        d2t (`Tensor | None`): `(draft_vocab_size,)`, what is added to a draft id to make it the target's; `None` where
            both vocabularies are the same.
        published (`Mapping[str, Any] | None`): the config.json that it was read from, if any.
    """

    methods = ("dflash", "auto")

    d2t: torch.Tensor | None
    published: Mapping[str, Any] | None = None

    def __init__(
        self,
        config: DFlashHeadConfig,
        *,
        has_embedding: bool = False,
        has_output_head: bool = False,
        has_mask_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        layer_config = config_of_layers(config.layer)
        layer_class, norm_class, rotary_class = LAYERS["qwen3"]
        hidden_size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.vocab_size, self.hidden_size = layer_config.vocab_size, hidden_size
        self.target_hidden_size, self.num_layers = config.target_hidden_size, layer_config.num_hidden_layers
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.drafts_at_root, self.span, self.sliding_span = config.drafts_at_root, config.span, config.sliding_span
        self.embed_tokens = nn.Embedding(layer_config.vocab_size, hidden_size) if has_embedding else None
        self.mask_embedding = nn.Parameter(torch.zeros(hidden_size)) if has_mask_embedding else None
        self.fc = nn.Linear(len(config.layer_ids) * config.target_hidden_size, hidden_size, bias=False)
        self.hidden_norm = norm_class(hidden_size, eps=eps)
        self.layers = nn.ModuleList([layer_class(layer_config, i) for i in range(self.num_layers)])
        self.norm = norm_class(hidden_size, eps=eps)
        self.rotary_emb = rotary_class(layer_config)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False) if has_output_head else None
        is_reduced = config.draft_vocab_size < layer_config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if is_reduced else None)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.follows_tokens = self.candidate_selector is not None
        if config.conv_kernel_size:
            for layer in self.layers:
                for name in ("attention_conv", "mlp_conv"):
                    shape = (config.block_size, hidden_size, config.conv_kernel_size, config.conv_group_size)
                    setattr(layer, name, BlockConvolution(*shape))

    def like(self, config: DFlashHeadConfig) -> "DFlashHead":
        """A new head of another shape with the parts that this one has."""
        return DFlashHead(
            config,
            has_embedding=self.embed_tokens is not None,
            has_output_head=self.lm_head is not None,
            has_mask_embedding=self.mask_embedding is not None,
        )

    @property
    def target_ids(self) -> torch.Tensor | None:
        """`(draft_vocab_size,)`: the target's id of each draft id; `None` where both are the same."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that the configuration names."""
        return self.config.layer_ids

    def cache_shapes(self) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return dict.fromkeys(range(self.num_layers), attention_shape(self.config.layer))

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
            states = states + _convolved(layer, "attention_conv", read, layer.input_layernorm(states))
            states = states + _convolved(layer, "mlp_conv", layer.mlp, layer.post_attention_layernorm(states))
        normed: torch.Tensor = self.norm(states)
        return normed

    def after(self, logits: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `BlockHead.after`."""
        assert self.candidate_selector is not None
        scored: torch.Tensor = self.candidate_selector(logits, tokens, states)
        return scored


def _convolved(
    layer: Any, name: str, compute: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor
) -> torch.Tensor:
    """Applies `compute` to `states`, both convolved where the layer has a convolution of this name."""
    convolution: BlockConvolution | None = getattr(layer, name, None)
    if convolution is None:
        return compute(states)
    states, added = convolution.before(states)
    return convolution.after(compute(states), added)


def _attention(
    attention: Any,
    states: torch.Tensor,
    *,
    context: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """Attention of a block's tokens to the target's states and to one another.

    Args:
        states: `(batch, N, hidden_size)` of the block, normalised.
        context: `(batch, C, hidden_size)` of the target's new states; the same in all layers.
        rotary: `(batch, C + N, head_dim)`.
        mask: `(batch, 1, N, K)`.
    """
    width, heads = states.shape[1], (-1, attention.head_dim)
    both = torch.cat([context, states], dim=1)
    queries = attention.q_norm(attention.q_proj(states).unflatten(-1, heads)).transpose(1, 2)
    keys = attention.k_norm(attention.k_proj(both).unflatten(-1, heads)).transpose(1, 2)
    values = attention.v_proj(both).unflatten(-1, heads).transpose(1, 2)
    cosine, sine = rotary
    queries = rotated(queries, cosine[:, -width:], sine[:, -width:])
    keys, values = cache.update(rotated(keys, cosine, sine), values, attention.layer_idx)
    mixed = attend(attention, queries, keys, values, mask)  # (batch, N, heads, head_dim)
    out: torch.Tensor = attention.o_proj(mixed.flatten(-2))
    return out
