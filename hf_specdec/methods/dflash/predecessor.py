"""DFlash 2's candidates: the likeliest tokens of a block, scored anew by the token before.

The tokens of a block are drafted at once, so each knows nothing of the one before it. This makes up for that, once it
is known which token that is. Source: https://github.com/z-lab/dflash.
"""

import torch
from torch import nn

from hf_specdec.methods.dflash.head_config import DFlashHeadConfig


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens by the token before and the state that drafts them; the others are left out."""

    def __init__(self, config: DFlashHeadConfig) -> None:
        super().__init__()
        vocab_size, rank = config.layer.vocab_size, config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(config.layer.hidden_size, rank, bias=False)

    def forward(self, logits: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `BlockHead.after`."""
        num_known = len(self.successor_codebook)
        logits = logits[..., :num_known]  # the target's vocabulary may be padded
        best, candidates = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)  # (N, top_k)
        context = self.predecessor_codebook[tokens.clamp(max=num_known - 1)] * self.hidden_projection(states)
        scores = (self.successor_codebook[candidates.to(context.device)] @ context[..., None])[..., 0]
        left = torch.full_like(logits, float("-inf"))
        return left.scatter(-1, candidates, best + scores.to(best))
