"""Interface of drafts that the target's own first layers make."""

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedModel

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.target.adapters import TreeAdapter
from hf_specdec.forward.target.tree_layout import TreeLayout


class EarlyExitRounds(Protocol):
    """Drafts of a model's own first layers."""

    def complete(self, trees: Sequence[DraftTree | None]) -> None:
        """The model is about to compute these trees: end the round of drafts."""

    def resume(self, layouts: Sequence[TreeLayout]) -> tuple[PreTrainedModel, TreeAdapter | None] | None:
        """Function that computes these columns from the drafts' last layer on; `None` for all of the model."""

    def resumed(self, layouts: Sequence[TreeLayout]) -> None:
        """Records that the columns were computed."""
