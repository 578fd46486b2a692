"""Blends what several sources say of a next token into one probability, by weights learned while decoding.

A candidate has one number from each source, its *evidence*: the log odds that the source gives it above a floor, and 0
where the source says nothing. Its probability is the logistic function of the weighted sum. Weights are kept apart for
kinds of context. Each token of the text moves them down the gradient of the log loss (logistic mixing, as in PAQ:
http://mattmahoney.net/dc/dce.html#Section_432). Safe to share between threads. Knows nothing about sources.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from hf_specdec.methods.shared_state import SharedState

__all__ = ["LARGEST", "Evidence", "Mixer", "weighted_sums"]

Evidence = tuple[Sequence[int], Sequence[float]]  # candidates, and one number for each

RATE = 0.02  # of the first steps; it falls with the root of what a kind has seen
SEEN_AT_RATE = 200.0
LONGEST_STEP = 2.0  # of a gradient's component, so that one odd token cannot turn the weights
LARGEST = 700.0  # exponent that a float holds
CLEAR = 0.002  # errors below it teach nothing


def weighted_sums(sources: Iterable[tuple[int, Evidence]], bias: float, *weights: float) -> dict[int, float]:
    """The log odds of every candidate.

    Args:
        sources: by the source's place among `weights`, candidates and its evidence for each.
    """
    sums: dict[int, float] = {}
    for source, (tokens, evidence) in sources:
        weight = weights[source]
        for token, value in zip(tokens, evidence, strict=False):
            sums[token] = sums.get(token, bias) + weight * value
    return sums


class Mixer(SharedState):
    """Weights by kind of context.

    Args:
        prior: for each kind the bias, then a weight for each source.

    Attributes:
        seen (`array`): tokens that each kind has learned from.
    """

    def __init__(self, prior: Sequence[tuple[float, ...]]) -> None:
        super().__init__()
        self._width = len(prior[0])
        self._weights = array("d", chain.from_iterable(prior))  # (kinds, width)
        self.seen = array("q", [0] * len(prior))

    @property
    def arrays(self) -> "tuple[array[float], array[int]]":
        """Weights of all kinds, one after the other, and what each has seen, as the compiled core takes them."""
        return self._weights, self.seen

    @property
    def weights(self) -> list[tuple[float, ...]]:
        """As `prior`, as learned so far."""
        return [self.weights_of(kind) for kind in range(len(self.seen))]

    def weights_of(self, kind: int) -> tuple[float, ...]:
        """Bias and weights of one kind."""
        return tuple(self._weights[kind * self._width : (kind + 1) * self._width])

    def restore(self, weights: Sequence[Sequence[float]], seen: Sequence[int]) -> None:
        """Go on from these weights and counts."""
        with self._lock:
            self._weights, self.seen = array("d", chain.from_iterable(weights)), array("q", seen)

    def probabilities(self, kind: int, evidence: Sequence[Sequence[float]]) -> list[float]:
        """Of each candidate, that it is the next token. They need not add up to one."""
        bias, *weights = self.weights_of(kind)
        sums = [bias + sum([weight * value for weight, value in zip(weights, row, strict=True)]) for row in evidence]
        return [1.0 / (1.0 + math.exp(min(-total, LARGEST))) for total in sums]

    def learn(self, kind: int, sources: Sequence[tuple[int, Evidence]], right: int) -> None:
        """Learn from one token of the text: `right`, whether any source named it or none.

        Args:
            sources: by the source's place, candidates and its evidence for each.
        """
        sums = weighted_sums(sources, *self.weights_of(kind))
        errors: dict[int, float] = {}
        for token, log_odds in sums.items():
            error = (token == right) - 1.0 / (1.0 + math.exp(min(-log_odds, LARGEST)))
            if abs(error) >= CLEAR:
                errors[token] = error
        with self._lock:
            rate = RATE / math.sqrt(1.0 + self.seen[kind] / SEEN_AT_RATE)
            self.seen[kind] += 1
            if not errors:
                return
            steps = [0.0] * self._width
            for error in errors.values():
                steps[0] += error
            for source, (tokens, evidence) in sources:
                for token, value in zip(tokens, evidence, strict=False):
                    if token in errors:
                        steps[source + 1] += errors[token] * value
            for place, step in enumerate(steps, kind * self._width):
                self._weights[place] += rate * max(-LONGEST_STEP, min(LONGEST_STEP, step))
