"""Drafts of sampled texts: the call's logits processors, and the random numbers of the draws to come.

`torch.multinomial` draws one token as the argmax of p / e, where e is exponentially distributed: one number for each
token of the vocabulary, and they depend on nothing but the state of the random generator. So what the target's p will
be divided by is known before p is. Where a draft's distribution q is near p, the argmax of q / e is likely to be the
token that is drawn, far likelier than the argmax of q. The text stays what the seed gives, as only drafts look at e.
Sources: https://arxiv.org/abs/1411.0030 (the Gumbel-max trick), https://arxiv.org/abs/2408.07978 (drafts that share
their random numbers with the target).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
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


LogitsProcessorFn = Callable[[Callable[[], torch.Tensor], torch.Tensor], torch.Tensor]
"""The processors for n nodes of one depth: of a function that gives their texts, `(n, L)` ids, and of
`(n, vocab_size)` logits."""


def process_rows(
    processor: LogitsProcessorFn,
    rows: torch.Tensor,
    depths: Sequence[int],
    text: Sequence[int],
    path_of: Callable[[int], list[int]],
) -> torch.Tensor:
    """`(n, vocab_size)` of `rows`, each shown the text up to its node.

    Args:
        depths: of the n nodes.
        text: tokens up to the root.
        path_of: gives the tokens below the text's last one down to a node, by its place among the n.
    """

    @cache
    def ids() -> torch.Tensor:
        return torch.tensor([list(text)], device=rows.device)  # (1, L)

    def texts_of(places: Sequence[int]) -> torch.Tensor:
        paths = torch.tensor([path_of(place) for place in places], dtype=torch.long, device=rows.device)
        return torch.cat((ids().expand(len(places), -1), paths), dim=1)

    processed: dict[int, torch.Tensor] = {}
    for depth in dict.fromkeys(depths):
        places = [place for place, other in enumerate(depths) if other == depth]
        texts = partial(texts_of, places)
        if len(places) == len(depths):
            return processor(texts, rows)
        result = processor(texts, rows[places])
        processed |= dict(zip(places, result, strict=True))
    return torch.stack([processed[place] for place in range(len(depths))])
