"""What an observer sees of one verify step."""

from dataclasses import dataclass
from typing import Any

from hf_specdec.tree import DraftTree

__all__ = ["SpecStep"]


@dataclass(frozen=True, slots=True)
class SpecStep:
    """One verify step of one row, as `spec_observer` sees it.

    Attributes:
        index (`int`): number of the step, from 0.
        tree (`DraftTree`): what was drafted; `tree.tokens[0]` was the last token of the text.
        accepted (`tuple[int, ...]`): the tokens that the step added to the text.
        path (`tuple[int, ...]`): nodes of the tree that are part of the text now, the root first.
        draft_seconds, verify_seconds, commit_seconds (`float`): where the step's time went, all rows together.
        row (`int`): row of the batch.
        view: what the drafter shows of itself after the step, such as a `LookaheadView`; `None` where it shows nothing.
    """

    index: int
    tree: DraftTree
    accepted: tuple[int, ...]
    path: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    row: int = 0
    view: Any = None
