"""Logits of a block that depend on the token before.

The tokens of a block are drafted at once, so each knows nothing of the one before it. Two kinds of heads make up for
that, once it is known which token that is: DSpark's adds to the logits (https://arxiv.org/abs/2607.05147), DFlash 2's
scores the likeliest tokens anew (https://github.com/z-lab/dflash).
"""

from abc import abstractmethod

import torch
from torch import nn

from hf_specdec.methods.dflash.head_config import DFlashHeadConfig


class PredecessorHead(nn.Module):
    """Base class. Attributes: `memory_size` (`int`), width of what is kept of a token for those after it."""

    memory_size: int = 0

    @abstractmethod
    def forward(
        self, logits: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor, memories: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockHead.after`."""


class MarkovHead(PredecessorHead):
    """Adds a matrix of low rank over pairs of tokens, `W2 W1[token]`.

    - "vanilla": by the token alone.
    - "gated": its embedding is weighed by the state that drafts the next token.
    - "rnn": by all tokens of the block so far, over a recurrent state.
    """

    def __init__(self, config: DFlashHeadConfig) -> None:
        super().__init__()
        self.kind, rank, hidden_size = config.markov_head_type, config.markov_rank, config.layer.hidden_size
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.memory_size = rank
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, logits: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor, memories: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockHead.after`."""
        known = self.markov_w1(tokens.clamp(max=self.markov_w1.num_embeddings - 1))
        if self.kind == "gated":
            known = torch.sigmoid(self.gate_proj(torch.cat([states, known], dim=-1))) * known
        elif self.kind == "rnn":
            kept, new, out = self.joint_proj(torch.cat([memories, known, states], dim=-1)).chunk(3, dim=-1)
            kept = torch.sigmoid(kept)
            memories = kept * memories + (1.0 - kept) * torch.tanh(new)
            known = torch.tanh(out)
        added = self.markov_w2(known).to(logits)
        width = min(added.shape[-1], logits.shape[-1])  # the target's vocabulary may be padded
        return logits[..., :width] + added[..., :width], memories


class CandidateSelector(PredecessorHead):
    """Scores the likeliest tokens by the token before and the state that drafts them; the others are left out."""

    def __init__(self, config: DFlashHeadConfig) -> None:
        super().__init__()
        vocab_size, rank = config.layer.vocab_size, config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(config.layer.hidden_size, rank, bias=False)

    def forward(
        self, logits: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor, memories: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockHead.after`."""
        num_known = len(self.successor_codebook)
        logits = logits[..., :num_known]  # the target's vocabulary may be padded
        best, candidates = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)  # (N, top_k)
        context = self.predecessor_codebook[tokens.clamp(max=num_known - 1)] * self.hidden_projection(states)
        scores = (self.successor_codebook[candidates.to(context.device)] @ context[..., None])[..., 0]
        left = torch.full_like(logits, float("-inf"))
        return left.scatter(-1, candidates, best + scores.to(best)), memories
