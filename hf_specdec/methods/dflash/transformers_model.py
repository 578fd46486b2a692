"""A DFlash model of transformers as a head."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.compat import CACHE
from hf_specdec.methods.common.draft_head import AttentionSpan, BlockHead, attention_shape
from hf_specdec.methods.common.wrapped_head import WrappedHead

FIELDS = ("block_size", "mask_token_id", "target_layer_ids")  # of the configuration of a DFlash model


class DFlashModelHead(WrappedHead, BlockHead):
    """A DFlash model; embeddings and output head are the target's.

    Layers with a window see as far ahead as back.

    Args:
        model: transformers' network.

    Raises:
        ConfigError: its attention takes no masks.
    """

    methods = ("dflash", "auto")
    skips_embedding_norm = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config)
        self.model, config = model, self.config
        self.lm_head, self.vocab_size = None, None  # its tokens are those of the target's output head
        self.block_size, self.mask_token_id = int(config.block_size), int(config.mask_token_id)
        if "sliding_attention" in config.layer_types:
            self.sliding_span = AttentionSpan(int(config.sliding_window), int(config.sliding_window))

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The outputs of the layers that the configuration names; it counts layers from 0."""
        return tuple(layer + 1 for layer in self.config.target_layer_ids)

    def cache_shapes(self) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return dict.fromkeys(range(self.num_layers), attention_shape(self.config))

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        sliding_mask: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """See `BlockHead.forward`."""
        masks = {"full_attention": mask, "sliding_attention": sliding_mask}
        states: torch.Tensor = self.model(
            noise_embeds=embeddings,
            context_hidden_states=features,
            attention_mask={kind: self._mask(seen, embeddings.dtype) for kind, seen in masks.items()},
            position_ids=positions,
            **{CACHE: cache},
        ).last_hidden_state
        return states


def is_dflash_config(config: object) -> bool:
    """True if a configuration is that of a DFlash model."""
    return all(hasattr(config, field) for field in FIELDS)
