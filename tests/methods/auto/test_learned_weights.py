"""Weights of the sources: multinomial logistic regression that learns which to believe, with bounded steps."""

import math
import random
from array import array
from collections.abc import Sequence

import pytest

from hf_specdec.methods.auto.search import Said
from hf_specdec.methods.auto.spec_memory import WIDTH, AdaptiveWeights
from tests.native.mixing import LONGEST_STEP, RATE, learn_weights, softmax, weighted_sums, weights_of

START = (-2.0, 0.0, 0.0)
Rows = Sequence[tuple[float, ...]]  # evidence of each candidate, by source


def learned_of(*kinds: tuple[float, ...]) -> AdaptiveWeights:
    """What begins with this bias and these weights of each kind of context."""
    learned = AdaptiveWeights()
    learned.weights = array("d", [weight for kind in kinds for weight in (*kind, *[0.0] * (WIDTH - len(kind)))])
    learned.seen = array("q", [0] * len(kinds))
    return learned


def said(rows: Rows) -> Said:
    """Evidence by candidate as evidence by source; candidates are numbered."""
    return [(source, (range(len(rows)), values)) for source, values in enumerate(zip(*rows, strict=True))]


def probabilities(learned: AdaptiveWeights, rows: Rows) -> list[float]:
    bias, *weights = weights_of(learned, 0)
    return softmax(weighted_sums(said(rows), bias, weights).values())


def synthetic(seed: int, count: int, scale: float = 5.0) -> list[tuple[list[tuple[float, float]], int]]:
    """Tokens with two candidates: one source names the right one in six of ten cases, the other says noise.

    In three of ten the other candidate is right, in one neither.
    """
    rng = random.Random(seed)
    tokens = []
    for _ in range(count):
        named = int(rng.random() < 0.5)
        rows = [(scale if place == named else 0.0, scale * rng.random()) for place in (0, 1)]
        tokens.append((rows, rng.choices([named, 1 - named, -1], [6, 3, 1])[0]))
    return tokens


def log_loss(learned: AdaptiveWeights, data: list[tuple[list[tuple[float, float]], int]]) -> float:
    total = 0.0
    for rows, right in data:
        shares = probabilities(learned, rows)
        total -= math.log(1.0 - sum(shares) if right < 0 else shares[right])
    return total / len(data)


@pytest.mark.parametrize("num_sources", [2, 6, 7])
def test_probabilities_are_the_softmax_of_the_weighted_evidence(num_sources: int) -> None:
    weights = [0.1 * (place + 1) for place in range(num_sources)]
    rows = [tuple(float((place + shift) % 3) for place in range(num_sources)) for shift in range(2)]
    shares = probabilities(learned_of((-1.0, *weights)), rows)
    scores = [-1.0 + sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in rows]
    total = 1.0 + sum(math.exp(score) for score in scores)
    assert shares == pytest.approx([math.exp(score) / total for score in scores])


def test_it_learns_whom_to_believe() -> None:
    learned, data = learned_of(START), synthetic(1, 400)
    before = log_loss(learned, data)
    for rows, right in synthetic(2, 4_000):
        learn_weights(learned, 0, said(rows), right)
    _, good, noise, *_ = weights_of(learned, 0)
    assert good > 2 * abs(noise)
    assert log_loss(learned, data) < 0.9 * before


def test_what_it_learned_is_calibrated() -> None:
    """Candidates named by the good source are right in six of ten cases, the others in three; it says so.

    Evidence is small here: beyond it, the bound of a step lets rare failures count less than they are worth.
    """
    learned = learned_of(START)
    for rows, right in synthetic(3, 8_000, scale=1.5):
        learn_weights(learned, 0, said(rows), right)
    data = synthetic(4, 2_000, scale=1.5)
    for named, share in ((True, 0.6), (False, 0.3)):
        shares = [
            probability
            for rows, _ in data
            for row, probability in zip(rows, probabilities(learned, rows), strict=True)
            if (row[0] > 0.0) == named
        ]
        assert sum(shares) / len(shares) == pytest.approx(share, abs=0.06)


def test_one_odd_token_moves_no_weight_far() -> None:
    learned = learned_of((0.0, 0.0, 0.0))
    learn_weights(learned, 0, said([(1e6, 3.0)] * 50), -1)
    assert [abs(weight) for weight in learned.weights[1:3]] == pytest.approx([RATE * LONGEST_STEP] * 2)


def test_kinds_learn_apart() -> None:
    learned = learned_of(START, START)
    for rows, right in synthetic(5, 50):
        learn_weights(learned, 0, said(rows), right)
    assert weights_of(learned, 0)[:3] != START
    assert weights_of(learned, 1)[:3] == START
