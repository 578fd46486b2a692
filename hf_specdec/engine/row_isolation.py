"""A drafter among strangers: where rows of one batch belong to different prompts, its error ends its own row alone.

row.drafter = GuardedDrafter(row)
"""

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec.engine.sequence import SequenceState
from hf_specdec.errors import ConfigError
from hf_specdec.methods.base import Drafter
from hf_specdec.observer import DraftedNode
from hf_specdec.tree import DraftTree

__all__ = ["GuardedDrafter"]


class GuardedDrafter(Drafter):
    """A row's drafter, which has begun; after an error of its own the row is finished, and `row.error` says why."""

    def __init__(self, row: SequenceState) -> None:
        self.row, self.drafter = row, row.drafter

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        """See `Drafter`; it may change from step to step."""
        return self.drafter.needs_logits

    @property
    def view(self) -> Any:
        """See `Drafter`."""
        return self.drafter.view

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """See `Drafter.describe`."""
        return self.drafter.describe(tree)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See `Drafter.begin`."""
        self.drafter.begin(prompt_ids)

    def propose(self, budget: int) -> DraftTree:
        """The drafter's tree, or after an error the root alone."""
        last = self.row.text.tokens[-1]
        try:
            self.drafter.draft_cost = self.draft_cost
            tree = self.drafter.propose(budget)
            if tree.tokens[0] != last:
                rule = "must be the last token of the text"
                raise ConfigError("tree.tokens[0]", rule, tree.tokens[0], "Build the tree on that root.")
        except Exception as error:  # noqa: BLE001 a sequence's error is its own, whatever it is
            self._fail(error)
            return DraftTree.chain(last)
        return tree

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """See `Drafter.observe`."""
        try:
            self.drafter.observe(tree, logits, accepted)
        except Exception as error:  # noqa: BLE001 a sequence's error is its own, whatever it is
            self._fail(error)

    def end(self) -> None:
        """See `Drafter.end`."""
        self.drafter.end()

    def _fail(self, error: Exception) -> None:
        self.row.error, self.row.finished = self.row.error or error, True
