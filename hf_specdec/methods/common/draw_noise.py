"""The random numbers of the draws to come, so that drafts can meet them.

`torch.multinomial` draws one token as the argmax of p / e, where e is exponentially distributed: one number for each
token of the vocabulary, and they depend on nothing but the state of the random generator. So what the target's p will
be divided by is known before p is. Where a draft's distribution q is near p, the argmax of q / e is likely to be the
token that is drawn, far likelier than the argmax of q. The text stays what the seed gives, as only drafts look at e.
Sources: https://arxiv.org/abs/1411.0030 (the Gumbel-max trick), https://arxiv.org/abs/2408.07978 (drafts that share
their random numbers with the target).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

SHARPNESS = 1.6  # how far the log odds of the token that is drawn go with those of q / e; measured


class DrawNoise(Protocol):
    """The e of the draws after a text's last token and after the nodes below it."""

    def row(self, depth: int) -> torch.Tensor:
        """`(vocab_size,)` fp32: what the probabilities after a node of this depth are divided by; 0 is the root's."""

    def on_host(self, depth: int) -> npt.NDArray[Any] | None:
        """`row` as an array; `None` where it has not been read from an accelerator."""


@dataclass(frozen=True, slots=True)
class NoiseBelow:
    """The noise below a node that is `depth` tokens after the root of another."""

    noise: DrawNoise
    depth: int

    def row(self, depth: int) -> torch.Tensor:
        """See `DrawNoise`."""
        return self.noise.row(self.depth + depth)

    def on_host(self, depth: int) -> npt.NDArray[Any] | None:
        """See `DrawNoise`."""
        return self.noise.on_host(self.depth + depth)


def coupled(logits: torch.Tensor, depths: Sequence[int], noise: DrawNoise) -> torch.Tensor:
    """Logits of the tokens that will be drawn, by a draft's distribution: `(n, vocab_size)` fp32.

    Args:
        logits: `(n, vocab_size)` of the draft, as logits processors leave them. Tokens that the target does not have
            are never drawn.
        depths: of the nodes that these follow.
    """
    rows = {depth: noise.row(depth).to(logits.device) for depth in dict.fromkeys(depths)}
    width = next(iter(rows.values())).shape[-1]
    divisors = torch.stack([rows[depth] for depth in depths])[:, : logits.shape[-1]]
    sums = SHARPNESS * (logits[:, :width].float() - divisors.log())
    return torch.nn.functional.pad(sums, (0, logits.shape[-1] - sums.shape[-1]), value=-torch.inf)
