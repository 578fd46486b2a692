"""Counted acceptances become probabilities; memory is bounded, and safe to share."""

import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.methods.common.entry import DrafterContext, MethodState
from hf_specdec.methods.common.ngrams import NgramPool
from hf_specdec.methods.draft_model.candidates import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.draft_model.method import METHOD
from tests.helpers.drafts import TableScorer


def fed(rates: dict[float, float], count: int = 300, rank: int = 0) -> AcceptanceCounts:
    """Counts of tokens whose acceptance depends on their confidence."""
    rng, counts = random.Random(0), AcceptanceCounts()
    for _ in range(count):
        counts.record([(rank, confidence, rng.random() < rate) for confidence, rate in rates.items()])
    return counts


def test_before_anything_is_counted_a_token_is_worth_its_confidence() -> None:
    counts = AcceptanceCounts()
    for confidence in (0.0, 0.3, 0.55, 1.0):
        assert counts.rate(0, confidence) == confidence
    assert counts.rate(0, 0.2, prior=0.7) == 0.7
    assert counts.mean(0) > counts.mean(1) > counts.mean(2) > counts.mean(3) == counts.mean(9)


def test_rates_approach_what_is_counted() -> None:
    """An overconfident draft: tokens of confidence 0.95 hold half of the time."""
    counts = fed({0.95: 0.5, 0.25: 0.9})
    assert abs(counts.rate(0, 0.93) - 0.5) < 0.1
    assert abs(counts.rate(0, 0.22) - 0.9) < 0.1
    assert counts.rate(0, 0.6) == 0.6, "other confidences are as they were"
    assert counts.rate(1, 0.93) == 0.93, "and so are other ranks"
    assert abs(counts.mean(0) - 0.7) < 0.1


def test_what_a_token_gains_beyond_a_bound_is_the_mean_of_what_was_counted() -> None:
    counts = fed({0.95: 1.0, 0.25: 0.2})
    gain = counts.gain_curve(1)
    for least, expected in ((0.0, 0.6), (0.5, 0.25), (0.9, 0.05), (1.0, 0.0)):
        assert abs(gain(least) - expected) < 0.03
    assert abs(gain(0.0) - counts.mean(0)) < 0.01


def test_old_counts_fade() -> None:
    counts = AcceptanceCounts()
    for accepted in [True] * 5_000 + [False] * 1_000:
        counts.record([(0, 0.5, accepted)])
    assert counts.rate(0, 0.5) < 0.3


def test_memory_is_bounded() -> None:
    few, many = fed({0.9: 0.5}, 10), fed({0.9: 0.5}, 5_000)
    assert len(pickle.dumps(many)) <= len(pickle.dumps(few)) + 100


def test_speed_is_tokens_over_the_cost_of_both_models() -> None:
    counts = AcceptanceCounts()
    for _ in range(5_000):
        counts.record([], num_forwards=4, num_nodes=10, num_tokens=3)
    for costs, expected in (((0.0,), 3.0), ((0.25,), 1.5), ((0.25, 0.1), 1.0)):
        assert abs(counts.tokens_per_cost(*costs) - expected) < 0.1


def test_threads_may_share_it() -> None:
    """No count is lost, and no reader sees half of one."""
    counts = AcceptanceCounts()
    wrong: list[float] = []

    def work() -> None:
        for _ in range(300):
            counts.record([(0, 0.9, True)])
            if not 0.0 <= counts.rate(0, 0.9) <= 1.0:
                wrong.append(counts.rate(0, 0.9))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = AcceptanceCounts()
    for _ in range(1_200):
        alone.record([(0, 0.9, True)])
    assert counts.rate(0, 0.9) == alone.rate(0, 0.9)
    assert not wrong


def test_sampled_and_greedy_calls_learn_apart() -> None:
    """Which drafts are accepted depends on temperature and top-p."""
    state = MethodState()

    def counts_of(**fields: Any) -> AcceptanceCounts:
        scorer = TableScorer(lambda text: torch.zeros(6), vocab_size=6)
        drafter = METHOD.make(DraftModelConfig(), DrafterContext(state, scorer=scorer, **fields))
        assert isinstance(drafter, DraftModelDrafter)
        return drafter.counts

    def process(ids: object, rows: torch.Tensor) -> torch.Tensor:
        return rows

    sampled = counts_of(is_sampled=True, logits_processor=process)
    assert sampled is counts_of(is_sampled=True, logits_processor=process)
    assert sampled is not counts_of()


# What is shared, a change of it, and what is seen of it.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "texts": (lambda: NgramPool(100), lambda pool: pool.add([5, 6, 7]), lambda pool: pool.generations()),
    "acceptances": (AcceptanceCounts, lambda counts: counts.record([(0, 0.9, True)]), lambda counts: counts.mean(0)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changes_while_a_copy_is_made_is_not_in_it(case: str) -> None:
    make, change, seen = CASES[case]
    shared = make()
    change(shared)
    before, state = seen(shared), shared.__getstate__()
    change(shared)
    twin = type(shared).__new__(type(shared))
    twin.__setstate__(state)
    assert seen(twin) == before != seen(shared)
