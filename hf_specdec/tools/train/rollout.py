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
from hf_specdec.tools.train.batch import Outcome, Texts, ahead, draft_ids, target_nats


class HeadRollout(nn.Module):
    """A head, rolled out.

    Args:
        head: what is trained.
        embed: token ids to embeddings, where the head has none of its own.
        steps (`int`): draft steps.
        decay (`float`): weight of a step's loss over that of the step before.
    """

    def __init__(
        self, head: Eagle3Head, embed: Callable[[torch.Tensor], torch.Tensor], *, steps: int, decay: float
    ) -> None:
        super().__init__()
        self.head, self.steps, self.decay = head, steps, decay
        self._embed = [embed]  # a list keeps the target's module out of this one's weights

    def forward(self, batch: Texts) -> Outcome:
        """Roll out every position from which the target wrote. Position i is the pair of token i + 1 and state i.

        The prompt's other positions are in the head's cache, as when it drafts, and have no loss of their own.
        """
        head, first = self.head, max(batch.num_prompt_tokens - 1, 0)
        seen = _visible(batch)  # (N, L - 1, L - 1)
        keys = torch.arange(1, seen.shape[-1] + 1, device=seen.device).expand(len(seen), -1)
        cache = DynamicCache()
        if first:
            with torch.no_grad():
                self._read(batch, slice(0, first), seen, keys, cache)
        states, batch, positions = self._states(batch, slice(first, None)), batch.since(first), keys[:, first:]
        length = positions.shape[1]
        embeddings = self._embed[0](batch.ids).to(states.dtype)
        mask = seen[:, None, first:]  # (N, 1, length, L - 1)
        own = torch.eye(length, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        loss = states.new_zeros((), dtype=torch.float32)
        kept = batch.real[:, :-1]  # (N, length): what all steps so far have got right
        accepted, total, weight = [], None, 1.0
        for step in range(self.steps):
            states = head(
                ahead(embeddings, 1 + step, length), states, positions + step, mask, cache, key_positions=keys
            )
            logits = head.logits(states).float()  # (N, length, draft_vocab_size): of token i + 2 + step
            loss = loss + weight * self._loss(logits, batch, 1 + step, length)
            chosen = head.target_ids[logits.argmax(-1)]
            counts = ahead(batch.written, 2 + step, length)
            kept = kept & counts & (chosen == ahead(batch.ids, 2 + step, length))
            # Every step is divided by the same positions: those with a token of the target's two places on.
            total = counts.sum() if total is None else total
            accepted.append(kept.sum())
            mask, keys = torch.cat([mask, own], dim=-1), torch.cat([keys, positions + step + 1], dim=1)
            weight *= self.decay
        assert total is not None
        return Outcome(loss, torch.stack(accepted), total)

    def _states(self, batch: Texts, columns: slice) -> torch.Tensor:
        """`(N, columns, hidden_size)` states of the target, as the head reads them."""
        return self.head.fuse(batch.features[:, :-1][:, columns].to(self.head.fc.weight.dtype))

    def _read(self, batch: Texts, columns: slice, seen: torch.Tensor, keys: torch.Tensor, cache: DynamicCache) -> None:
        """Put the pairs of the first columns into the head's cache."""
        states = self._states(batch, columns)
        tokens = self._embed[0](batch.ids[:, 1:][:, columns]).to(states.dtype)
        positions = keys[:, columns]
        self.head(tokens, states, positions, seen[:, None, columns, columns], cache, key_positions=positions)

    def _loss(self, logits: torch.Tensor, batch: Texts, places_on: int, length: int) -> torch.Tensor:
        """Cross-entropy under the target's distribution over the tokens that the head can draft."""
        ids, probabilities = ahead(batch.top_ids, places_on, length), ahead(batch.top_probabilities, places_on, length)
        places = draft_ids(self.head.target_ids, self.head.config.vocab_size)[ids]  # (N, length, TOP)
        nats, total = target_nats(logits, places, probabilities)
        used = ahead(batch.real, places_on, length) & batch.real[:, :-1] & (total > 0.0)
        return (nats * used).sum() / used.sum().clamp(min=1)


def _visible(batch: Texts) -> torch.Tensor:
    """`(N, L - 1, L - 1)` bool: which pairs each pair sees; padding is never seen."""
    length = batch.ids.shape[1] - 1
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=batch.ids.device)
    return (causal & batch.real[:, None, :-1]) | own
