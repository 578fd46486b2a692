"""Heads whose network is a module of transformers; embeddings and output head may be the target's."""

from typing import Any

import torch

from hf_specdec.compat import attention_implementation, text_config
from hf_specdec.compat.masks import MASKED
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import DraftHead


class WrappedHead(DraftHead):
    """Base class of heads that transformers computes. They read the target's embeddings.

    Args:
        config: of the network.

    Raises:
        ConfigError: the network's attention takes no masks.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = None
        self.config, self.text, self.name_or_path = config, text_config(config), config.name_or_path
        attention = attention_implementation(config)
        if attention not in MASKED:
            rule = f"must be {' or '.join(MASKED)} for a draft head, whose rows see masks"
            raise ConfigError("attn_implementation", rule, attention, "Load the head without it.")
        self._is_additive = attention == "eager"
        self.vocab_size = getattr(self.text, "vocab_size", None)
        self.num_layers = int(self.text.num_hidden_layers)
        self.hidden_size = self.target_hidden_size = int(self.text.hidden_size)

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The last hidden state."""
        return (num_layers,)

    def _mask(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A bool mask as the network's attention takes it."""
        if not self._is_additive:
            return seen
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
