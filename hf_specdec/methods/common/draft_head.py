"""Draft heads as the engine sees them: networks that draft from what the target computed, and keep no text."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import nn

Distances = TypeVar("Distances", npt.NDArray[Any], torch.Tensor)


class DraftHead(nn.Module):
    """Base class of heads. Subclasses compute; the engine keeps the text.

    Attributes:
        methods (`tuple[str, ...]`): names of the methods that draft with such a head, its own first.
        embed_tokens (`nn.Embedding | None`): token embeddings of its own; without, it reads the target's.
        skips_embedding_norm (`bool`): whether it reads the target's embeddings without a norm that the target's
            embedding module applies.
        name_or_path (`str`): what it was loaded from.
        vocab_size (`int | None`): tokens of the target that it was made for; `None` where it uses the target's own
            output head.
        hidden_size (`int`): width of the states, and of the embeddings that it reads.
        target_hidden_size (`int`): width of the target's hidden states.
        num_layers (`int`): decoder layers that one forward computes.
    """

    methods: tuple[str, ...] = ()
    name_or_path: str = ""
    skips_embedding_norm: bool = False

    embed_tokens: nn.Embedding | None
    vocab_size: int | None
    hidden_size: int
    target_hidden_size: int
    num_layers: int

    @property
    def num_weights(self) -> int:
        """Weights that one forward reads; token embeddings are only looked up."""
        count = sum(weight.numel() for weight in self.parameters())
        return count if self.embed_tokens is None else count - self.embed_tokens.weight.numel()

    @property
    def target_ids(self) -> torch.Tensor | None:
        """`(draft_vocab_size,)`: the target's id of each draft id; `None` where both are the same."""
        return None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.parameters()).dtype

    @abstractmethod
    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers, as `output_hidden_states` counts."""


class PairHead(DraftHead):
    """A head that reads pairs: a token with the state of the position before it. It has a cache of its own.

    A head of several stages computes depth d of a draft with stage d, and what is deeper with the last one. The pairs
    of stage s + 1 have the states that stage s computed.

    Attributes:
        num_stages (`int`): decoder stacks that take turns.
        has_window (`bool`): whether a layer slides, so that `forward` needs `key_positions`.
    """

    num_stages: int = 1
    has_window: bool

    @abstractmethod
    def cache_shapes(self, stage: int) -> Mapping[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer of a stage, by its number in the cache."""

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
        stage: int = 0,
    ) -> torch.Tensor:
        """The states after Q tokens, each with the state of the position before it: `(batch, Q, hidden_size)`.

        Args:
            embeddings, states: `(batch, Q, hidden_size)`.
            positions: `(batch, Q)`.
            mask: `(batch, 1, Q, K)` bool: which of the K keys, those of the cache and then the new ones, each token
                sees.
            cache: a transformers cache; the new keys and values are written to it.
            key_positions: `(batch, K)`, for layers with a sliding window.
            stage: which decoder stack computes.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab_size)` of states that `forward` returned."""


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Span of tokens that those of a block see.

    Attributes:
        back (`int | None`): positions before a token's own; `None` for all.
        ahead (`int | None`): positions after it; `None` for all.
        from_root (`bool`): whether `back` is counted from the block's first token.
    """

    back: int | None = None
    ahead: int | None = None
    from_root: bool = False

    @property
    def is_all(self) -> bool:
        """True if every token sees all the others."""
        return self.back is None and self.ahead is None

    def sees(self, distances: Distances) -> Distances:
        """Mask of the seen keys by `(rows, blocks, N, K)` distances: a token's position less that of the key."""
        back, ahead = (math.inf if bound is None else bound for bound in (self.back, self.ahead))
        of_text = distances[:, :, :1] if self.from_root else distances
        seen: Distances = (of_text <= back) & (distances >= -ahead)
        return seen


class BlockHead(DraftHead):
    """A head that drafts a block of tokens in one forward: the last token, and a mask for each token to be drafted.

    The tokens of a block are drafted without knowing one another. The cache holds what the head made of the target's
    hidden states.

    Attributes:
        block_size (`int`): tokens of a block, the last token of the text among them.
        mask_token_id (`int`): the token of the target in the place of one to be drafted.
        lm_head (`nn.Linear | None`): an output head of its own; without, the target's reads its states.
        span: of layers without a sliding window.
        sliding_span: of those with one; `None` where no layer has one.
    """

    block_size: int
    mask_token_id: int
    lm_head: nn.Linear | None
    span: AttentionSpan = AttentionSpan()
    sliding_span: AttentionSpan | None = None

    @property
    def num_drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - 1

    @abstractmethod
    def cache_shapes(self) -> Mapping[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""

    @abstractmethod
    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        sliding_mask: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """The states of a block, for the output head: `(batch, N, hidden_size)`.

        Args:
            embeddings: `(batch, N, hidden_size)` of the last token and the masks.
            features: `(batch, C, num_features * target_hidden_size)` hidden states of the target that are new.
            positions: `(batch, C + N)`.
            mask, sliding_mask: `(batch, 1, N, K)` bool, for layers without and with a window: which of the K keys,
                those of the cache, of the features and of the block, each token of the block sees.
            cache: a transformers cache; the C + N new keys and values are written to it.
        """


def attention_shape(config: Any) -> tuple[int, int, int]:
    """Key/value heads, key size and value size of ordinary attention layers, by their configuration."""
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(config.num_key_value_heads), head_dim, head_dim


def within(
    window: int | None, mask: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor | None
) -> torch.Tensor:
    """Cuts `mask` to a layer's sliding window, `(batch, 1, Q, K)` bool.

    Args:
        window: how many positions back, a token's own counted; `None` for all.
        positions: `(batch, Q)`.
        key_positions: `(batch, K)`; `None` where no layer slides.
    """
    if window is None or key_positions is None:
        return mask
    return mask & (positions[:, None, :, None] - key_positions[:, None, None, :] < window)
