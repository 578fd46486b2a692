"""Blends what several sources say of a next token into one distribution, by weights learned while decoding.

A candidate has one number from each source, its *evidence*: the log odds that the source gives it above a floor, and 0
where the source says nothing. Its score is a bias and the weighted sum of these. The softmax of all scores, and of 0
for every token that is no candidate, gives the probabilities. Weights are kept apart for kinds of context. Each token
of the text moves them down the gradient of the log loss: multinomial logistic regression, which for two outcomes is the
logistic mixing of PAQ (http://mattmahoney.net/dc/dce.html#Section_432). Safe to share between threads. Knows nothing
about sources.
"""

import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from hf_specdec.methods.common.shared_state import SharedState

Evidence = tuple[Sequence[int], Sequence[float]]  # candidates, and one number for each
NoiseScores = tuple[Sequence[float], float]  # minus the logarithm of the noise of each candidate's draw; of all others'

RATE = 0.02  # of the first steps; it falls with the root of what a kind has seen
SEEN_AT_RATE = 200.0
LONGEST_STEP = 2.0  # of a gradient's component, so that one odd token cannot turn the weights
CLEAR = 0.002  # errors below it teach nothing


def weighted_sums(sources: Iterable[tuple[int, Evidence]], bias: float, *weights: float) -> dict[int, float]:
    """The score of every candidate.

    Args:
        sources: by the source's place among `weights`, candidates and its evidence for each.
    """
    sums: dict[int, float] = {}
    for source, (tokens, evidence) in sources:
        weight = weights[source]
        for token, value in zip(tokens, evidence, strict=False):
            sums[token] = sums.get(token, bias) + weight * value
    return sums


def softmax(scores: Iterable[float], noise: NoiseScores | None = None) -> list[float]:
    """Of each candidate, that it is the next token.

    Args:
        noise: where it is known from what noise the token is drawn. The token drawn has the greatest p / e, where e is
            its noise; p is known up to an error of the score, and where that is Gumbel distributed the chances are as
            p / e is.
    """
    known, others = [*scores], 0.0
    if noise is not None:
        known, others = [score + of_draw for score, of_draw in zip(known, noise[0], strict=True)], noise[1]
    largest = max([others, *known])
    shares, total = [math.exp(score - largest) for score in known], math.exp(others - largest)
    for share in shares:  # one after the other, as the compiled core adds them
        total += share
    return [share / total for share in shares]


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
        """Of each candidate, that it is the next token."""
        bias, *weights = self.weights_of(kind)
        return softmax([bias + sum(map(operator.mul, weights, row)) for row in evidence])

    def learn(
        self, kind: int, sources: Sequence[tuple[int, Evidence]], right: int, noise: NoiseScores | None = None
    ) -> None:
        """Learn from one token of the text: `right`, whether any source named it or none.

        Args:
            sources: by the source's place, candidates and its evidence for each.
            noise: of its draw, as for `softmax`, the candidates in the order in which the sources name them.
        """
        sums = weighted_sums(sources, *self.weights_of(kind))
        errors: dict[int, float] = {}
        for token, probability in zip(sums, softmax(sums.values(), noise), strict=True):
            error = (token == right) - probability
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
