"""A draft head as the engine sees it: a small network over a token's embedding and the state before it."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

__all__ = ["DraftHead"]


class DraftHead(nn.Module):
    """Base class of heads that draft from the target's hidden states. Subclasses compute; the engine keeps the text.

    Attributes:
        embed_tokens (`nn.Embedding | None`): token embeddings of its own; without, it reads the target's.
        name_or_path (`str`): what it was loaded from.
    """

    name_or_path: str = ""

    embed_tokens: nn.Embedding | None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens of the target that it was made for."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of the states, and of the embeddings that it reads."""

    @property
    @abstractmethod
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""

    @property
    @abstractmethod
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key/value heads, head size."""

    @property
    @abstractmethod
    def has_window(self) -> bool:
        """Whether a layer slides, so that `forward` needs `key_positions`."""

    @property
    @abstractmethod
    def target_ids(self) -> torch.Tensor:
        """`(draft_vocab_size,)`: the target's id of each draft id."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @abstractmethod
    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers, as `output_hidden_states` counts."""

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """`(..., num_features * target_hidden_size)` hidden states of the target -> `(..., hidden_size)` states."""

    @abstractmethod
    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        key_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The states after Q tokens, each beside the state of the position before it: `(batch, Q, hidden_size)`.

        Args:
            embeddings, states: `(batch, Q, hidden_size)`.
            positions: `(batch, Q)`.
            mask: `(batch, 1, Q, K)` bool: which of the K keys, those of the cache and then the new ones, each token
                sees.
            cache: a transformers cache; the new keys and values are written to it.
            key_positions: `(batch, K)`, for layers with a sliding window.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab_size)` of states that `forward` returned."""
