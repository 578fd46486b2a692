"""Drafts nothing: the loop emits one token a step."""

from collections.abc import Sequence

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult


class PlainDrafter(BaseDrafter):
    """Proposes the root alone."""

    never_drafts = True

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = prompt_ids[-1]

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """The last token of the text, nothing below it."""
        return DraftTree.chain(self._last)

    def learn_from(self, result: DraftResult) -> None:
        """Remember the last token."""
        self._last = result.accepted[-1]
