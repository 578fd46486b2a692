"""Tokens that a forward computes beside a draft tree. Knows nothing about trees, models or caches."""

from dataclasses import dataclass

import torch

__all__ = ["ExtraTokens"]


@dataclass(frozen=True, slots=True)
class ExtraTokens:
    """Tokens whose logits a drafter wants without drafting them, such as lookahead's window: E of them.

    They stand behind the tree's nodes in the forward, see the text before the root, and never enter the text.

    Attributes:
        tokens (`tuple[int, ...]`): token id of each.
        depths (`tuple[int, ...]`): position id = position of the root + depth.
        visible (`Tensor`): `(E, 1 + E)` bool, on the CPU: entry (i, 0) says that token i sees the root, entry
            (i, 1 + j) that it sees extra token j. Each sees itself.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    visible: torch.Tensor

    def __len__(self) -> int:
        """Number of tokens E."""
        return len(self.tokens)
