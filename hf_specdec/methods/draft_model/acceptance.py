"""Counts of accepted drafts: the worth of a draft's confidence, learned by counting.

A drafted token is known by its rank among its siblings and by the probability that the draft gave it. Counted is
whether the target took it, given that it took everything before it. Old counts fade, so memory is bounded and a new
kind of text is noticed. Knows no clocks: the same counts give the same estimates. Safe to share between threads.
"""

import bisect
import itertools
from collections.abc import Iterable

from hf_specdec.methods.common.entry import SharedState

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
