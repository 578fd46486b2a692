"""The nodes of a draft tree while a draft model grows it, and their worth, learned by counting what was accepted.

A candidate's value is the estimated probability that the target accepts it and all before it. A drafted token counts by
its rank among its siblings and by the probability that the draft gave it: whether the target took it, given that it
took everything before it. Old counts fade, so memory is bounded and a new kind of text is noticed. Knows neither models
nor clocks, nor when to stop: the same counts give the same estimates.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.entry import SharedState
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors

BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_MEANS = (0.6, 0.15, 0.08, 0.04)  # acceptance of a first, second, third, later child before anything is counted
PRIOR_WEIGHT = 8.0  # observations that a prior counts as
PRIOR_TOKENS = 2.0  # tokens a step before anything is counted
MAX_COUNT = 256.0  # a count that reaches this is halved


class GainCurve:
    """Worth of children of an accepted parent beyond a bound: those below it are not verified, and worth nothing.

    Args:
        children: acceptance of each kind of child, and how many of it there are on the mean.
    """

    def __init__(self, children: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(children, reverse=True)
        self._below = [-acceptance for acceptance, _ in ordered]
        self._numbers = list(itertools.accumulate([number for _, number in ordered], initial=0.0))
        self._accepted = list(
            itertools.accumulate([number * acceptance for acceptance, number in ordered], initial=0.0)
        )

    def __call__(self, least: float) -> float:
        """Expected accepted children beyond what as many of acceptance `least` would bring."""
        place = bisect.bisect_left(self._below, -least)
        return self._accepted[place] - least * self._numbers[place]


class AcceptanceCounts(SharedState):
    """Acceptances by rank and confidence, and what the rounds brought altogether."""

    def __init__(self) -> None:
        super().__init__()
        ranks = range(len(PRIOR_MEANS))
        # [rank][bin] -> [seen, accepted]
        self._bins = [[[0.0, 0.0] for _ in range(len(BIN_EDGES) + 1)] for _ in ranks]
        self._means = [[0.0, 0.0] for _ in ranks]
        self._rounds = self._forwards = self._nodes = self._tokens = 0.0

    def record(
        self,
        observations: Iterable[tuple[int, float, bool]],
        *,
        num_forwards: int = 0,
        num_nodes: int = 0,
        num_tokens: int = 1,
    ) -> None:
        """Add one round.

        Args:
            observations: rank, confidence and acceptance of each drafted token whose parent was accepted.
            num_forwards: forwards of the draft.
            num_nodes: drafted tokens that the target verified.
            num_tokens: tokens the round added to the text.
        """
        with self._lock:
            for rank, confidence, accepted in observations:
                rank = min(rank, len(self._means) - 1)
                cell = self._bins[rank][bisect.bisect(BIN_EDGES, confidence)]
                for count in (cell, self._means[rank]):
                    count[0] += 1.0
                    count[1] += accepted
                    if count[0] >= MAX_COUNT:
                        count[:] = [count[0] / 2, count[1] / 2]
            self._rounds += 1
            self._forwards += num_forwards
            self._nodes += num_nodes
            self._tokens += num_tokens
            if self._rounds >= MAX_COUNT:
                self._rounds, self._forwards = self._rounds / 2, self._forwards / 2
                self._nodes, self._tokens = self._nodes / 2, self._tokens / 2

    def rate(self, rank: int, confidence: float, prior: float | None = None) -> float:
        """Probability that such a token is accepted if its parent is; `prior` (the confidence) while little is known.

        Args:
            rank: place among its siblings, 0 for the first.
            confidence: the draft's probability of the token.
            prior: estimate that a few observations outweigh.
        """
        with self._lock:
            seen, accepted = self._bins[min(rank, len(self._means) - 1)][bisect.bisect(BIN_EDGES, confidence)]
        prior = confidence if prior is None else prior
        return (accepted + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)

    def mean(self, rank: int) -> float:
        """Probability that a child of this rank is accepted if its parent is, whatever its confidence."""
        rank = min(rank, len(self._means) - 1)
        with self._lock:
            seen, accepted = self._means[rank]
        return (accepted + PRIOR_WEIGHT * PRIOR_MEANS[rank]) / (seen + PRIOR_WEIGHT)

    def gain_curve(self, num_ranks: int) -> GainCurve:
        """Worth of the children of an accepted parent, by what is counted now.

        Before anything is counted, a child is taken to be either surely accepted or surely not.

        Args:
            num_ranks: how many children it has.
        """
        children: list[tuple[float, float]] = []
        with self._lock:
            for rank in range(num_ranks):
                kind = min(rank, len(self._means) - 1)
                cells = [(seen, accepted) for seen, accepted in self._bins[kind] if seen]
                total = sum([seen for seen, _ in cells]) + PRIOR_WEIGHT
                children += [(accepted / seen, seen / total) for seen, accepted in cells]
                children.append((1.0, PRIOR_WEIGHT * PRIOR_MEANS[kind] / total))
        return GainCurve(children)

    def tokens_per_cost(self, relative_cost: float, token_cost: float = 0.0) -> float:
        """Tokens gained in the time of one forward of the target for one token.

        Args:
            relative_cost: what a forward of the draft costs over that.
            token_cost: what a drafted token adds to it.
        """
        with self._lock:
            tokens = self._tokens + PRIOR_WEIGHT * PRIOR_TOKENS
            cost = self._rounds + PRIOR_WEIGHT + relative_cost * (self._forwards + PRIOR_WEIGHT * PRIOR_TOKENS)
            cost += token_cost * (self._nodes + PRIOR_WEIGHT * PRIOR_TOKENS)
        return tokens / cost


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
