"""A DFlash model of transformers as a head."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation
from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_head import BlockHead

__all__ = ["DFlashHead", "dflash_head_of", "is_dflash_config"]

FIELDS = ("block_size", "mask_token_id", "target_layer_ids")  # of the configuration of a DFlash model
MASKED = ("sdpa", "eager")


class DFlashHead(BlockHead):
    """A DFlash model; embeddings and output head are the target's.

    Args:
        model: transformers' network.

    Raises:
        ConfigError: its attention takes no masks.
    """

    methods = ("dflash", "auto")
    skips_embedding_norm = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.embed_tokens = None
        self.model, self.config, self.name_or_path = model, model.config, model.config.name_or_path
        attention = attention_implementation(model.config)
        if attention not in MASKED:
            rule = f"must be {' or '.join(MASKED)} for a draft head, whose rows see masks"
            raise ConfigError("attn_implementation", rule, attention, "Load the head without it.")
        self._is_additive = attention == "eager"

    @property
    def vocab_size(self) -> None:
        """Its tokens are those of the target's output head."""
        return

    @property
    def hidden_size(self) -> int:
        """Width of the states, and of the embeddings that it reads."""
        return int(self.config.hidden_size)

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return self.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers that one forward computes."""
        return int(self.config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.config.block_size)

    @property
    def mask_token_id(self) -> int:
        """The token of the target that stands for one to be drafted."""
        return int(self.config.mask_token_id)

    @property
    def window(self) -> int | None:
        """How far layers with a sliding window see."""
        return int(self.config.sliding_window) if "sliding_attention" in self.config.layer_types else None

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The outputs of the layers that the configuration names; it counts layers from 0."""
        return tuple(layer + 1 for layer in self.config.target_layer_ids)

    def cache_shapes(self) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        config = self.config
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return dict.fromkeys(range(self.num_layers), (int(config.num_key_value_heads), head_dim, head_dim))

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
        if self._is_additive:
            least = torch.finfo(embeddings.dtype).min
            masks = {
                kind: torch.zeros_like(seen, dtype=embeddings.dtype).masked_fill(~seen, least)
                for kind, seen in masks.items()
            }
        states: torch.Tensor = self.model(
            noise_embeds=embeddings,
            context_hidden_states=features,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
        ).last_hidden_state
        return states


def dflash_head_of(assistant: object) -> DFlashHead | None:
    """A DFlash model of transformers as a head, known by its configuration; `None` for anything else."""
    if not isinstance(assistant, PreTrainedModel):
        return None
    return DFlashHead(assistant) if is_dflash_config(assistant.config) else None


def is_dflash_config(config: object) -> bool:
    """Whether a configuration is that of a DFlash model."""
    return all(hasattr(config, field) for field in FIELDS)
