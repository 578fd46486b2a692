"""The mixer: logistic mixing that learns which sources to believe, with bounded steps."""

import math
import pickle
import random
from collections.abc import Sequence

import pytest

from hf_specdec.methods.auto.mixer import LONGEST_STEP, RATE, Evidence, Mixer

START = (-2.0, 0.0, 0.0)


def sources(rows: Sequence[tuple[float, ...]]) -> list[tuple[int, Evidence]]:
    """Evidence by candidate as evidence by source; candidates are numbered."""
    return [(source, (range(len(rows)), values)) for source, values in enumerate(zip(*rows, strict=True))]


def synthetic(seed: int, count: int, scale: float = 5.0) -> list[tuple[list[tuple[float, float]], int]]:
    """Tokens with two candidates: one source names the right one in three of four cases, the other says noise."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        right = int(rng.random() < 0.5)
        named = right if rng.random() < 0.75 else 1 - right
        rows = [(scale if place == named else 0.0, scale * rng.random()) for place in (0, 1)]
        found.append((rows, right))
    return found


def log_loss(mixer: Mixer, data: list[tuple[list[tuple[float, float]], int]]) -> float:
    total = 0.0
    for rows, right in data:
        for place, probability in enumerate(mixer.probabilities(0, rows)):
            total -= math.log(probability if place == right else 1.0 - probability)
    return total / len(data)


@pytest.mark.parametrize("num_sources", [2, 6, 7])
def test_a_probability_is_the_logistic_function_of_the_weighted_evidence(num_sources: int) -> None:
    weights = [0.1 * (place + 1) for place in range(num_sources)]
    row = [float(place % 3) for place in range(num_sources)]
    (found,) = Mixer([(-1.0, *weights)]).probabilities(0, [row])
    total = -1.0 + sum(weight * value for weight, value in zip(weights, row, strict=True))
    assert found == pytest.approx(1.0 / (1.0 + math.exp(-total)))


def test_it_learns_whom_to_believe() -> None:
    mixer, data = Mixer([START]), synthetic(1, 400)
    before = log_loss(mixer, data)
    for rows, right in synthetic(2, 4_000):
        mixer.learn(0, sources(rows), right)
    _, good, noise = mixer.weights[0]
    assert good > 5 * abs(noise)
    assert log_loss(mixer, data) < 0.8 * before


def test_what_it_learned_is_calibrated() -> None:
    """Candidates named by the good source are right in three of four cases, the others in one; it says so.

    Evidence is small here: beyond it, the bound of a step lets rare failures count less than they are worth.
    """
    mixer = Mixer([START])
    for rows, right in synthetic(3, 8_000, scale=1.5):
        mixer.learn(0, sources(rows), right)
    data = synthetic(4, 2_000, scale=1.5)
    for named, share in ((True, 0.75), (False, 0.25)):
        said = [
            probability
            for rows, _ in data
            for row, probability in zip(rows, mixer.probabilities(0, rows), strict=True)
            if (row[0] > 0.0) == named
        ]
        assert sum(said) / len(said) == pytest.approx(share, abs=0.06)


def test_where_no_candidate_is_right_all_lose() -> None:
    mixer, rows = Mixer([(0.0, 0.5, 0.5)]), [(1.0, 0.0), (0.0, 2.0)]
    before = mixer.probabilities(0, rows)
    mixer.learn(0, sources(rows), -1)
    assert all(now < then for now, then in zip(mixer.probabilities(0, rows), before, strict=True))


def test_one_odd_token_moves_no_weight_far() -> None:
    mixer = Mixer([(0.0, 0.0, 0.0)])
    mixer.learn(0, sources([(1e6, 3.0)] * 50), -1)
    assert [abs(weight) for weight in mixer.weights[0]] == pytest.approx([RATE * LONGEST_STEP] * 3)


def test_steps_shrink_with_what_a_kind_has_seen() -> None:
    mixer = Mixer([(0.0, 0.0, 0.0)] * 2)
    mixer.seen[1] = 20_000
    for kind in (0, 1):
        mixer.learn(kind, sources([(1.0, 1.0)]), 0)
    assert 0.0 < mixer.weights[1][1] < 0.2 * mixer.weights[0][1]
    assert list(mixer.seen) == [1, 20_001]


def test_kinds_learn_apart() -> None:
    mixer = Mixer([START] * 2)
    for rows, right in synthetic(5, 50):
        mixer.learn(0, sources(rows), right)
    assert mixer.weights[0] != START
    assert mixer.weights[1] == START


def test_errors_too_small_to_matter_teach_nothing() -> None:
    mixer = Mixer([(-9.0, 0.1, 0.1)])
    mixer.learn(0, sources([(0.5, 0.5)]), -1)
    assert mixer.weights == [(-9.0, 0.1, 0.1)]
    mixer.learn(0, sources([(0.5, 0.5)]), 0)
    assert mixer.weights != [(-9.0, 0.1, 0.1)]


def test_a_copy_learns_on_alone() -> None:
    mixer = Mixer([START])
    mixer.learn(0, sources([(1.0, 1.0)]), 0)
    other = pickle.loads(pickle.dumps(mixer))
    assert (other.weights, other.seen) == (mixer.weights, mixer.seen)
    other.learn(0, sources([(1.0, 1.0)]), 0)
    assert other.weights != mixer.weights
