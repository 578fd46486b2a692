"""Drafts nothing: the loop emits one token a step."""

from collections.abc import Sequence

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.base import Drafter


class PlainDrafter(Drafter):
    """Proposes the root alone."""

    never_drafts = True

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        """The last token of the text, nothing below it."""
        return DraftTree.chain(self._last)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = accepted[-1]
