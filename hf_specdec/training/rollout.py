"""A head's own draft steps over whole texts, their loss and how many of their tokens the text accepts.

The paper's training-time test (arXiv 2503.01840, section 3.2): draft step k of a position reads the state that step
k - 1 ended with, and sees the text's columns up to its own and, of the later steps, its own columns. Texts stand in
for the target's choices, so what is counted on texts of its own is what a chain of drafts would have kept.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import DynamicCache

from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.training.batch import Batch, Outcome, ahead

__all__ = ["HeadRollout"]


class HeadRollout(nn.Module):
    """A head, rolled out.

    Args:
        head: what is trained.
        embed: token ids to embeddings, where the head has none of its own.
        steps (`int`): draft steps.
        decay (`float`): weight of a step's loss over that of the step before.
    """

    draft_ids: torch.Tensor

    def __init__(
        self, head: Eagle3Head, embed: Callable[[torch.Tensor], torch.Tensor], *, steps: int, decay: float
    ) -> None:
        super().__init__()
        self.head, self.steps, self.decay = head, steps, decay
        self._embed = [embed]  # a list keeps the target's module out of this one's weights
        draft_ids = torch.full((head.config.vocab_size,), -1)
        draft_ids[head.target_ids.cpu()] = torch.arange(head.config.draft_vocab_size)
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # target's id -> draft id, or -1

    def forward(self, batch: Batch) -> Outcome:
        """Roll out every position. Position i is the pair of token i + 1 and the target's state of token i."""
        head, length = self.head, batch.ids.shape[1] - 1
        states = head.fuse(batch.features[:, :-1].to(head.fc.weight.dtype))  # (N, length, hidden_size)
        causal = torch.ones(length, length, dtype=torch.bool, device=states.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=states.device)
        text_mask = (causal & batch.real[:, None, :-1]) | own  # (N, length, length); padding is never seen
        diagonal = own.expand(len(text_mask), -1, -1)
        embeddings = self._embed[0](batch.ids).to(states.dtype)
        positions = torch.arange(1, length + 1, device=states.device).expand(len(batch.ids), -1)
        cache, mask = DynamicCache(), text_mask[:, None]
        places = positions
        loss = states.new_zeros((), dtype=torch.float32)
        kept = batch.real[:, :-1]  # (N, length): what all steps so far have got right
        accepted, total, weight = [], None, 1.0
        for step in range(self.steps):
            tokens = ahead(embeddings, 1 + step, length)
            states = head(tokens, states, positions + step, mask, cache, key_positions=places)
            logits = head.logits(states).float()  # (N, length, draft_vocab_size): of token i + 2 + step
            loss = loss + weight * self._loss(logits, batch, 1 + step, length)
            chosen = head.target_ids[logits.argmax(-1)]
            counts = ahead(batch.counted & batch.real, 2 + step, length)
            kept = kept & counts & (chosen == ahead(batch.ids, 2 + step, length))
            # Every step is divided by the same positions: those with a token of the target's two places on.
            total = counts.sum() if total is None else total
            accepted.append(kept.sum())
            mask = torch.cat([mask, diagonal[:, None]], dim=-1)
            places = torch.cat([places, positions + step + 1], dim=1)
            weight *= self.decay
        assert total is not None
        return Outcome(loss, torch.stack(accepted), total)

    def _loss(self, logits: torch.Tensor, batch: Batch, places_on: int, length: int) -> torch.Tensor:
        """Cross-entropy under the target's distribution over the tokens that the head can draft."""
        ids, probabilities = ahead(batch.top_ids, places_on, length), ahead(batch.top_probabilities, places_on, length)
        places = self.draft_ids[ids]  # (N, length, TOP)
        wanted = probabilities.float() * (places >= 0)
        total = wanted.sum(-1)
        used = ahead(batch.real, places_on, length) & batch.real[:, :-1] & (total > 0.0)
        found = logits.gather(-1, places.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        nats = -(wanted * found).sum(-1) / total.clamp(min=1e-6)
        return (nats * used).sum() / used.sum().clamp(min=1)
