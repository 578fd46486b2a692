"""Mixing of the sources' evidence in Python: softmax, its learning, and the correction by what was accepted."""

import math
from collections.abc import Iterable, Sequence

from hf_specdec.methods.auto.recycled_logits import MAX_KEY
from hf_specdec.methods.auto.search import Said
from hf_specdec.methods.auto.spec_memory import (
    MAX_EXPECTED,
    MOST,
    NUM_BINS,
    NUM_MATCH_KINDS,
    WIDTH,
    AdaptiveWeights,
)

__all__ = [
    "LONGEST_STEP",
    "RATE",
    "Noise",
    "corrected",
    "kind_of",
    "learn_outcomes",
    "learn_weights",
    "softmax",
    "sum_of",
    "weighted_sums",
    "weights_of",
]
RATE = 0.02  # of the weights' first steps; it falls with the root of what a kind has seen
SEEN_AT_RATE = 200.0
LONGEST_STEP = 2.0  # of a gradient's component, so that one odd token cannot turn the weights
CLEAR = 0.002  # errors below it teach nothing
MATCH_KINDS = (0, 1, 2, 3, 4, 4, 5)  # kind of a context by its longest match; longer ones are like the last
Noise = tuple[Sequence[float], float]  # minus the logarithm of the noise of each candidate's draw; of all others'


def kind_of(longest_match: int, longest_key: int, is_drafted: bool) -> int:
    """Kind of a context by the longest match in this text, the longest recycled key, and the draft model."""
    match = MATCH_KINDS[min(longest_match, len(MATCH_KINDS) - 1)]
    return (is_drafted * NUM_MATCH_KINDS + match) * (MAX_KEY + 1) + longest_key


def weights_of(learned: AdaptiveWeights, kind: int) -> tuple[float, ...]:
    """Bias and weights of one kind of context."""
    return tuple(learned.weights[kind * WIDTH : (kind + 1) * WIDTH])


def corrected(learned: AdaptiveWeights, probability: float) -> float:
    """Share of tokens drafted with this probability that is accepted."""
    return min(MOST, probability * learned.factors[_bin_of(probability)])


def learn_outcomes(learned: AdaptiveWeights, outcomes: Iterable[tuple[float, bool]]) -> None:
    """Learn from drafted tokens whose parents were accepted: each one's uncorrected probability, and its fate.

    Each bin's share moves towards what was seen; few outcomes move it little.
    """
    for probability, accepted in outcomes:
        place = _bin_of(probability)
        learned.expected[place] += probability
        learned.accepted[place] += accepted
        if learned.expected[place] > MAX_EXPECTED:
            learned.expected[place] /= 2
            learned.accepted[place] /= 2
        learned.correct(place)


def _bin_of(probability: float) -> int:
    return min(NUM_BINS - 1, int(probability * NUM_BINS))


def weighted_sums(said: Said, bias: float, weights: Sequence[float]) -> dict[int, float]:
    """Score of every candidate."""
    sums: dict[int, float] = {}
    for source, (tokens, evidence) in said:
        for token, value in zip(tokens, evidence, strict=False):
            sums[token] = sums.get(token, bias) + weights[source] * value
    return sums


def softmax(scores: Iterable[float], noise: Noise | None = None) -> list[float]:
    """Probability of each candidate.

    Args:
        noise: where it is known from what noise the token is drawn. The token drawn has the greatest p / e, where e is
            its noise; p is known up to an error of the score, and where that is Gumbel distributed the chances are as
            p / e is.
    """
    seen, others = [*scores], 0.0
    if noise is not None:
        seen, others = [score + of_draw for score, of_draw in zip(seen, noise[0], strict=True)], noise[1]
    largest = max([others, *seen])
    shares = [math.exp(score - largest) for score in seen]
    total = sum_of([math.exp(others - largest), *shares])
    return [share / total for share in shares]


def learn_weights(learned: AdaptiveWeights, kind: int, said: Said, right: int, noise: Noise | None = None) -> None:
    """Learn from one token of the text: `right`, whether any source named it or none."""
    bias, *weights = weights_of(learned, kind)
    sums = weighted_sums(said, bias, weights)
    errors = {t: (t == right) - share for t, share in zip(sums, softmax(sums.values(), noise), strict=True)}
    errors = {token: error for token, error in errors.items() if abs(error) >= CLEAR}
    steps = [sum_of(errors.values()), *[0.0] * (WIDTH - 1)]
    for source, (tokens, evidence) in said:
        for token, value in zip(tokens, evidence, strict=False):
            if token in errors:
                steps[source + 1] += errors[token] * value
    rate = RATE / math.sqrt(1.0 + learned.seen[kind] / SEEN_AT_RATE)
    learned.seen[kind] += 1
    for place, step in enumerate(steps if errors else (), kind * WIDTH):
        learned.weights[place] += rate * max(-LONGEST_STEP, min(LONGEST_STEP, step))


def sum_of(numbers: Iterable[float]) -> float:
    """Add numbers one after the other, as the compiled core does; `sum` makes up for rounding."""
    total = 0.0
    for number in numbers:
        total += number
    return total
