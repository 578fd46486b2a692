"""A draft's logits as the call's logits processors leave them, for the nodes of a tree that grows below a text."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

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
