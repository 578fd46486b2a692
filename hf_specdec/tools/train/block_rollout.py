"""Blocks of a DFlash head over whole texts, their loss and how many of their tokens the text accepts.

After arXiv 2602.06036: some tokens of each text begin a block, all blocks of a batch are computed in one forward, and
each sees the target's states of the text before it. Texts stand in for the target's choices, so what is counted on
texts of its own is what a chain of drafts would have kept.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import DynamicCache

from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.tools.train.batch import Outcome, Texts, draft_ids, target_nats


class BlockRollout(nn.Module):
    """A head over the blocks of a batch.

    Args:
        head: what is trained.
        embed: token ids to embeddings.
        project: states of the head to logits over the tokens that it drafts.
        steps (`int`): drafted tokens of the chains that are counted.
        blocks (`int`): of each text: drawn while the head is trained, evenly spread where it is measured.
        decay (`float`): weight of a place's loss over that of the place before.
    """

    def __init__(
        self,
        head: DFlashHead,
        embed: Callable[[torch.Tensor], torch.Tensor],
        project: Callable[[torch.Tensor], torch.Tensor],
        *,
        steps: int,
        blocks: int,
        decay: float,
    ) -> None:
        super().__init__()
        self.head, self.steps, self.blocks = head, steps, blocks
        self._target = embed, project  # a tuple keeps the target's modules out of this one's weights
        self.register_buffer("weights", decay ** torch.arange(head.num_drafted), persistent=False)

    def forward(self, batch: Texts) -> Outcome:
        """Loss and accepted chains of the blocks."""
        anchors, used = self._anchors(batch)  # (N, A)
        states = self._states(batch, anchors)  # (N, A, num_drafted, hidden_size)
        places = anchors[..., None] + torch.arange(self.head.num_drafted, device=anchors.device)  # tokens before
        last = batch.ids.shape[1] - 1
        counts = used[..., None] & (places < last) & _at(batch.written, (places + 1).clamp(max=last))
        before = places.clamp(max=last)
        logits = self._logits(states, _at(batch.ids, before)).float()  # (N, A, num_drafted, vocab_size)
        chosen, target_ids = logits.argmax(-1), self.head.target_ids
        chosen = chosen if target_ids is None else target_ids[chosen]
        right = counts & (chosen == _at(batch.ids, (places + 1).clamp(max=last)))
        kept = right.cumprod(-1)[..., : self.steps]
        total = counts[..., 0].sum()
        wanted = _at(batch.top_ids, before), _at(batch.top_probabilities, before)
        nats = self._nats(logits, *wanted)
        if self.head.candidate_selector is not None:  # it trains what it chose alone
            nats = nats + self._nats(self._target[1](states).float(), *wanted)
        weights = self.get_buffer("weights") * counts
        return Outcome((nats * weights).sum() / total.clamp(min=1), kept.sum((0, 1)), total)

    def _anchors(self, batch: Texts) -> tuple[torch.Tensor, torch.Tensor]:
        """`(N, A)` tokens at which blocks begin, before ones that the target wrote, and whether there are so many."""
        follows = torch.zeros_like(batch.written)
        follows[:, :-1] = batch.written[:, 1:] & batch.real[:, :-1]
        counts = follows.sum(-1, keepdim=True)  # (N, 1)
        wanted = torch.arange(min(self.blocks, follows.shape[1]), device=counts.device)
        if self.training:
            order = torch.rand(follows.shape, device=follows.device).masked_fill(~follows, -1.0)
            return order.argsort(-1, descending=True)[:, : len(wanted)], wanted < counts
        places = (~follows).int().argsort(dim=-1, stable=True)  # those that count first, in their order
        ranks = torch.where(counts > len(wanted), wanted * counts // len(wanted), wanted)  # (N, A)
        return places.gather(-1, ranks), wanted < counts

    def _states(self, batch: Texts, anchors: torch.Tensor) -> torch.Tensor:
        """`(N, A, num_drafted, hidden_size)` that draft the tokens after `anchors`."""
        head, size = self.head, self.head.block_size
        rows, blocks = anchors.shape
        length = batch.ids.shape[1]
        tokens = torch.full((rows, blocks, size), head.mask_token_id, device=anchors.device)
        tokens[..., 0] = _at(batch.ids, anchors)
        own = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)  # (N, A * size)
        columns = torch.arange(length, device=anchors.device).expand(rows, -1)
        owner = torch.arange(blocks, device=anchors.device).repeat_interleave(size)
        sees_text = (columns[:, None] < anchors.repeat_interleave(size, dim=1)[..., None]) & batch.real[:, None]
        sees_block = (owner[:, None] == owner).expand(rows, -1, -1)
        mask = torch.cat([sees_text, sees_block], dim=-1)[:, None]  # (N, 1, A * size, L + A * size)
        positions = torch.cat([columns, own], dim=1)
        distances = (own[..., None] - positions[:, None]).view(rows, blocks, size, -1)
        spans = (head.span, head.span if head.sliding_span is None else head.sliding_span)
        masks = [mask if span.is_all else mask & span.sees(distances).flatten(1, 2)[:, None] for span in spans]
        dtype = head.fc.weight.dtype
        states = head(
            self._target[0](tokens.flatten(1)).to(dtype),
            batch.features.to(dtype),
            positions,
            *masks,
            DynamicCache(),
        )
        drafting: torch.Tensor = states.view(rows, blocks, size, -1)[:, :, size - head.num_drafted :]
        return drafting

    def _logits(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`(N, A, num_drafted, vocab_size)`, each after the text's own tokens before it, `(N, A, num_drafted)`."""
        logits, head = self._target[1](states), self.head
        if head.memory_size is None:
            return logits
        memories = states.new_zeros((states.shape[0] * states.shape[1], head.memory_size))
        found = []
        for place in range(states.shape[2]):
            own, before, drafting = (part[:, :, place].flatten(0, 1) for part in (logits, tokens, states))
            own, memories = head.after(own, before, drafting, memories)
            found.append(own.view(*states.shape[:2], -1))
        return torch.stack(found, dim=2)

    def _nats(self, logits: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Cross-entropy under the target's distributions over the tokens that the head can draft."""
        target_ids = self.head.target_ids
        if target_ids is not None:
            ids = draft_ids(target_ids, self.head.config.layer.vocab_size)[ids]
        return target_nats(logits, ids, probabilities)[0]


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Values at `places`, `(N, ...)`, of `(N, L, ...)`."""
    rows = torch.arange(len(values), device=values.device).view(-1, *[1] * (places.ndim - 1))
    return values[rows, places]
