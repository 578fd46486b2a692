"""Calibration: what is said is corrected by what came of it."""

import random

import pytest

from hf_specdec.methods.auto.spec_memory import MOST, AdaptiveWeights
from tests.native.mixing import corrected, learn_outcomes


def outcomes(said: float, true: float, count: int, seed: int = 0) -> list[tuple[float, bool]]:
    rng = random.Random(seed)
    return [(said, rng.random() < true) for _ in range(count)]


@pytest.mark.parametrize(("said", "true"), [(0.8, 0.4), (0.3, 0.6), (0.52, 0.52)])
def test_it_comes_to_say_what_happens(said: float, true: float) -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(said, true, 2_000))
    assert corrected(learned, said) == pytest.approx(true, abs=0.08)


def test_bins_are_corrected_apart() -> None:
    learned = AdaptiveWeights()
    learn_outcomes(learned, outcomes(0.82, 0.1, 500))
    assert [corrected(learned, said) for said in (0.0, 0.42)] == [0.0, 0.42], "at first it believes what is said"


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
