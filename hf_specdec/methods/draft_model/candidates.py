"""The nodes of a draft tree while a draft model grows it: what they are worth, and where they come from.

A candidate's value is the estimated probability that the target accepts it and all before it. Knows neither models
nor when to stop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors
from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts


@dataclass(slots=True, eq=False)
class Candidate:
    """A node that may become part of the draft.

    Attributes:
        token, parent, depth: as in a `DraftTree`; the root has no parent.
        rank: place among its siblings.
        confidence: the draft's probability of the token; of its being drawn, where the noise of the draw is known.
        value: estimated probability that the target accepts the whole path.
        scored_as: its node in the requests; `None` as long as the draft has not scored it.
        children: those that were drafted, by their tokens.
    """

    token: int
    parent: "Candidate | None" = None
    depth: int = 0
    rank: int = 0
    confidence: float = 1.0
    value: float = 1.0
    scored_as: int | None = None
    children: "dict[int, Candidate]" = field(default_factory=dict)

    def add(self, token: int, rank: int, confidence: float, value: float) -> "Candidate":
        """A new child."""
        child = self.children[token] = Candidate(token, self, self.depth + 1, rank, confidence, value)
        return child

    def path(self) -> list[int]:
        """Tokens below the root down to this one."""
        tokens: list[int] = []
        candidate = self
        while candidate.parent is not None:
            tokens.append(candidate.token)
            candidate = candidate.parent
        return tokens[::-1]


class Growth:
    """One round: its root, the tree of the requests, and in the end the candidates that were kept.

    Args:
        root: the last token that the draft has read.
        tail: tokens of the text after it, which are read with each round; the last of them is the root then.
    """

    def __init__(self, root: int, tail: Sequence[int] = ()) -> None:
        self.root = Candidate([root, *tail][-1])
        self.last_scored = self.root
        self.scored = TreeBuilder(root)
        self._place = self.scored.add_path(0, tail)  # of the root
        self.num_forwards = 0

    def request(self, chosen: Sequence[Candidate]) -> DraftTree:
        """The tree to be scored next: all that was scored before, and `chosen` after it."""
        for candidate in chosen:
            if candidate.parent is None:
                candidate.scored_as = self._place
            else:
                assert candidate.parent.scored_as is not None
                candidate.scored_as = self.scored.add(candidate.parent.scored_as, candidate.token)
        self.last_scored = chosen[-1]
        return self.scored.build()

    @staticmethod
    def rows_of(chosen: Sequence[Candidate], rows: NodeLogits) -> NodeLogits:
        """The rows of `chosen` among those of all nodes that were scored with them."""
        return rows if len(rows) == len(chosen) else rows.part(slice(-len(chosen), None))

    def keep(self, candidates: Iterable[Candidate]) -> DraftTree:
        """The tree of these candidates, parents before children, numbered in their order."""
        builder = TreeBuilder(self.root.token)
        places = {self.root: 0}
        for candidate in candidates:
            assert candidate.parent is not None
            places[candidate] = builder.add(places[candidate.parent], candidate.token)
        return builder.build()


def likeliest_children(
    parents: Sequence[Candidate], rows: NodeLogits, num_branches: int, counts: AcceptanceCounts
) -> list[Candidate]:
    """For each parent its `num_branches` likeliest tokens, best first; `rows` are the parents'."""
    best, log_probs = rows.top(num_branches)
    children = []
    for parent, confidences, tokens in zip(parents, np.exp(log_probs).tolist(), best.tolist(), strict=True):
        for rank, (confidence, token) in enumerate(zip(confidences, tokens, strict=True)):
            if confidence > 0.0:
                value = parent.value * counts.rate(rank, confidence)
                children.append(parent.add(token, rank, confidence, value))
    return children


def drawn_child(
    parent: Candidate, row: torch.Tensor, counts: AcceptanceCounts, generator: torch.Generator | None
) -> Candidate:
    """A child that is drawn from the parent's row of probabilities."""
    drawn = torch.multinomial(row, 1, generator=generator)
    [confidence], [token] = (part.tolist() for part in read_tensors((row[drawn].float(), drawn)))
    # P(accept) = min(1, p / q): even an unlikely token is taken where the target agrees that it is one
    value = parent.value * counts.rate(0, confidence, prior=(1.0 + confidence) / 2.0)
    return parent.add(int(token), 0, confidence, value)


def depth_first(root: Candidate, kept: Sequence[Candidate]) -> list[Candidate]:
    """Branch by branch, best child first: where the first branch is accepted, nothing has to move in a cache."""
    below: dict[Candidate, list[Candidate]] = {}
    for candidate in kept:
        assert candidate.parent is not None
        below.setdefault(candidate.parent, []).append(candidate)
    ordered: list[Candidate] = []
    waiting = below.get(root, [])[::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting += below.get(ordered[-1], [])[::-1]
    return ordered
