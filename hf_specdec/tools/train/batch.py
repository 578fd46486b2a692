"""Texts to train on, and what a draft of any kind makes of them."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TENSORS = ("ids", "features", "top_ids", "top_probabilities", "real")


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one length, N of them.

    Attributes:
        ids (`Tensor`): `(N, L)`, prompts and what the target wrote after them.
        features (`Tensor`): `(N, L, num_features * hidden_size)` bf16; no feature where a draft reads none.
        top_ids, top_probabilities (`Tensor`): `(N, L, TOP)`, the target's distribution after each token.
        real (`Tensor`): `(N, L)` bool, false on the padding at the front and behind a text's end.
        num_prompt_tokens (`int`): columns of the prompts; the target wrote the rest.
        temperature (`float`): at which the texts were written.
    """

    ids: torch.Tensor
    features: torch.Tensor
    top_ids: torch.Tensor
    top_probabilities: torch.Tensor
    real: torch.Tensor
    num_prompt_tokens: int
    temperature: float = 0.0

    @property
    def written(self) -> torch.Tensor:
        """`(N, L)` bool: tokens that the target wrote, whose acceptance counts."""
        written = self.real.clone()
        written[:, : self.num_prompt_tokens] = False
        return written

    def since(self, column: int) -> "Texts":
        """The columns from `column` on."""
        later = self._each(lambda tensor: tensor[:, column:])
        return dataclasses.replace(later, num_prompt_tokens=max(self.num_prompt_tokens - column, 0))

    def batch(self, rows: torch.Tensor, device: torch.device) -> "Texts":
        """The texts of these numbers, `(rows,)`, on a device."""
        return self._each(lambda tensor: tensor[rows].to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Texts":
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in TENSORS}
        return dataclasses.replace(self, **changed)


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


def target_nats(
    logits: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(...)`: cross-entropy of `(..., vocab_size)` logits under the target's distributions, and what these sum up to.

    Args:
        ids, probabilities: `(..., TOP)` of the target's likeliest tokens; ids that cannot be drafted are left out.
    """
    is_known = (ids >= 0) & (ids < logits.shape[-1])
    found = logits.gather(-1, ids.where(is_known, 0))
    is_known &= found > -math.inf
    wanted = probabilities.float() * is_known
    total = wanted.sum(-1)
    nats = (logits.logsumexp(-1, keepdim=True) - found.where(is_known, 0.0)) * wanted
    return nats.sum(-1) / total.clamp(min=1e-6), total


def ahead(values: torch.Tensor, places: int, length: int) -> torch.Tensor:
    """`(N, length, ...)`: what stands `places` further on in `(N, L, ...)`; zeros behind the end."""
    moved = values[:, places : places + length]
    missing = length - moved.shape[1]
    return torch.cat([moved, moved.new_zeros((len(moved), missing, *moved.shape[2:]))], dim=1) if missing else moved
