"""Records that an observer gets of each verify step.

def show(step):
    for token, node in zip(step.tree.tokens[1:], step.nodes):
        print(token, node.source, node.probability)

model.generate(**inputs, spec_method="auto", spec_observer=show)
"""

from dataclasses import dataclass
from typing import Any

from hf_specdec.common.tree import DraftTree


@dataclass(frozen=True, slots=True)
class SourceVote:
    """Prediction of one source for a drafted token, where a method blends several.

    Attributes:
        source (`str`): which.
        probability (`float`): of the token after its parent, by this source alone.
        weight (`float`): log odds that it added to the blend.
    """

    source: str
    probability: float
    weight: float


@dataclass(frozen=True, slots=True)
class DraftedNode:
    """Origin of one drafted node.

    Attributes:
        source (`str`): `"text"`, `"earlier_texts"`, `"recycled_logits"`, `"window"`, `"draft_model"`, `"grammar"` for
            forced tokens, or the head's
            method: `"eagle3"`, `"mtp"` or `"dflash"`; of a blend, the source that added most.
        probability (`float | None`): that the target accepts the node and all before it, as its drafter estimated;
            `None` where it estimates nothing.
        votes (`tuple[SourceVote, ...]`): what each source of a blend said of it.
    """

    source: str
    probability: float | None = None
    votes: tuple[SourceVote, ...] = ()


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
        nodes (`tuple[DraftedNode, ...]`): where each drafted node of `tree` came from, node 1 first; empty where the
            drafter does not say.
        observer_seconds (`float`): time that observing took in the steps before this one, for clocks to leave out.
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
    nodes: tuple[DraftedNode, ...] = ()
    observer_seconds: float = 0.0
