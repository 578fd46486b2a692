"""Texts to train on, and what a draft of any kind makes of them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts to train on; shapes as in `Shard`.

    Attributes:
        num_prompt_tokens (`int`): columns of the prompts; the target wrote the rest.
    """

    ids: torch.Tensor
    features: torch.Tensor
    top_ids: torch.Tensor
    top_probabilities: torch.Tensor
    real: torch.Tensor
    num_prompt_tokens: int

    @property
    def written(self) -> torch.Tensor:
        """`(N, L)` bool: tokens that the target wrote, whose acceptance counts."""
        written = self.real.clone()
        written[:, : self.num_prompt_tokens] = False
        return written

    def since(self, column: int) -> "Batch":
        """The columns from `column` on."""
        return Batch(
            ids=self.ids[:, column:],
            features=self.features[:, column:],
            top_ids=self.top_ids[:, column:],
            top_probabilities=self.top_probabilities[:, column:],
            real=self.real[:, column:],
            num_prompt_tokens=max(self.num_prompt_tokens - column, 0),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Sums over the positions of a batch.

    Attributes:
        loss (`Tensor`): `()`, mean nats a position, the steps weighted.
        accepted (`Tensor`): `(steps,)`: positions whose drafts up to this step were the text's tokens.
        num_positions (`Tensor`): `()`: positions that could have been accepted.
    """

    loss: torch.Tensor
    accepted: torch.Tensor
    num_positions: torch.Tensor


def draft_ids(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`(vocab_size,)`: the draft id of each of the target's tokens, -1 where there is none.

    Args:
        target_ids: `(draft_vocab_size,)`, of a head as it is now: a state that was loaded may have changed them.
    """
    found = torch.full((vocab_size,), -1, device=target_ids.device)
    return found.scatter(0, target_ids, torch.arange(len(target_ids), device=target_ids.device))


def ahead(values: torch.Tensor, places: int, length: int) -> torch.Tensor:
    """`(N, length, ...)`: what stands `places` further on in `(N, L, ...)`; zeros behind the end."""
    moved = values[:, places : places + length]
    missing = length - moved.shape[1]
    return torch.cat([moved, moved.new_zeros((len(moved), missing, *moved.shape[2:]))], dim=1) if missing else moved
