"""Calibration: what is said is corrected by what came of it."""

import pickle
import random

import pytest

from hf_specdec.methods.auto.adaptive_weights import MOST, AdaptiveWeights
from tests.native.mixing import corrected, learn_outcomes


def outcomes(said: float, true: float, count: int, seed: int = 0) -> list[tuple[float, bool]]:
    rng = random.Random(seed)
    return [(said, rng.random() < true) for _ in range(count)]


def test_at_first_it_believes_what_is_said() -> None:
    learned = AdaptiveWeights()
    assert [corrected(learned, said) for said in (0.0, 0.31, 0.9)] == [0.0, 0.31, 0.9]


@pytest.mark.parametrize(("said", "true"), [(0.8, 0.4), (0.3, 0.6), (0.52, 0.52)])
def test_it_comes_to_say_what_happens(said: float, true: float) -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(said, true, 2_000))
    assert corrected(learned, said) == pytest.approx(true, abs=0.08)


def test_a_few_outcomes_move_it_little() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.8, 0.0, 2))
    assert 0.6 < corrected(learned, 0.8) < 0.8


def test_bins_are_corrected_apart() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.82, 0.1, 500))
    assert corrected(learned, 0.42) == 0.42


def test_what_was_long_ago_fades() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.5, 1.0, 5_000))
    learn_outcomes(learned, outcomes(0.5, 0.25, 1_000))
    assert corrected(learned, 0.5) == pytest.approx(0.25, abs=0.08)


def test_nothing_is_ever_certain() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.6, 1.0, 2_000))
    assert corrected(learned, 0.6) <= MOST
    assert corrected(learned, 1.0) == MOST
    assert corrected(learned, 0.64) > 0.9


def test_a_copy_goes_on_alone() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.7, 0.2, 100))
    other = pickle.loads(pickle.dumps(learned))
    assert corrected(other, 0.7) == corrected(learned, 0.7)
    learn_outcomes(other, outcomes(0.7, 1.0, 100))
    assert corrected(other, 0.7) > corrected(learned, 0.7)
