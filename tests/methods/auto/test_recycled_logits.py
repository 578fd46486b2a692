"""Recycled logits: the newest entry under each ending, in bounded memory."""

import math
import pickle
import threading

import pytest
import torch

from hf_specdec.methods.auto.recycled_logits import FLOOR, NUM_KEPT, Entry, RecycledLogits, best_tokens, log_odds


def entry(token: int) -> Entry:
    return (token,), (1.0,)


def test_an_entry_is_found_under_every_ending_of_its_tokens() -> None:
    recycled = RecycledLogits(100)
    recycled.put((5, 6, 7), entry(1))
    assert [recycled.get(key) for key in ((7,), (6, 7), (5, 6, 7))] == [entry(1)] * 3
    assert [recycled.get(key) for key in ((5,), (5, 6), (4, 6, 7))] == [None] * 3


def test_the_newest_entry_counts() -> None:
    recycled = RecycledLogits(100)
    recycled.put((5, 6), entry(1))
    recycled.put((8, 6), entry(2))
    assert recycled.get((6,)) == entry(2)
    assert recycled.get((5, 6)) == entry(1)


def test_an_older_entry_is_found_until_its_generation_is_dropped() -> None:
    recycled = RecycledLogits(20)
    recycled.put((1,), entry(1))
    for token in range(100, 110):
        recycled.put((token,), entry(0))
    assert recycled.get((1,)) == entry(1)
    for token in range(110, 120):
        recycled.put((token,), entry(0))
    assert recycled.get((1,)) is None


@pytest.mark.parametrize("bound", [6, 7, 50, 301])
def test_it_never_holds_more_than_its_bound(bound: int) -> None:
    recycled = RecycledLogits(bound)
    most = 0
    for token in range(4 * bound):
        recycled.put((token, token + 1, token + 2), entry(0))
        most = max(most, len(recycled))
    assert bound // 2 - 3 < most <= bound


def test_threads_that_write_at_once_lose_no_entry_of_their_own() -> None:
    recycled = RecycledLogits(100_000)

    def work(first: int) -> None:
        for token in range(first, first + 2_000):
            recycled.put((token,), entry(token))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recycled) == 6_000
    assert recycled.get((11_999,)) == entry(11_999)


@pytest.mark.parametrize("vocab_size", [3, NUM_KEPT, 50])
def test_the_best_tokens_come_with_their_log_odds(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size)
    for row, (tokens, evidence) in zip(logits, best_tokens(logits), strict=True):
        shares = row.softmax(-1)
        order = shares.argsort(descending=True)[:NUM_KEPT].tolist()
        assert list(tokens) == order
        expected = [max(0.0, math.log(float(shares[token] / (1 - shares[token]))) + FLOOR) for token in order]
        assert list(evidence) == pytest.approx(expected, abs=1e-4)


def test_evidence_is_bounded_at_both_ends() -> None:
    found = log_odds(torch.tensor([0.0, 1e-4, 0.5, 1.0], dtype=torch.double))
    assert found.tolist() == pytest.approx([0.0, 0.0, FLOOR, FLOOR + math.log(1e6)], abs=1e-3)


def test_logits_of_half_precision_are_taken() -> None:
    (whole,) = best_tokens(torch.tensor([[0.0, 2.0, 1.0, -4.0]]))
    (half,) = best_tokens(torch.tensor([[0.0, 2.0, 1.0, -4.0]], dtype=torch.bfloat16))
    assert half[0] == whole[0] == (1, 2, 0, 3)
    assert half[1] == pytest.approx(whole[1], abs=0.1)


def test_it_is_copied_with_what_it_holds() -> None:
    recycled = RecycledLogits(100)
    recycled.put((5, 6), entry(1))
    other = pickle.loads(pickle.dumps(recycled))
    other.put((5, 6), entry(2))
    assert (recycled.get((6,)), other.get((6,))) == (entry(1), entry(2))


@pytest.mark.parametrize(("bound", "num_kept"), [(1_000, 60), (40, 40), (10, 10)])
def test_another_bound_keeps_the_newest_entries(bound: int, num_kept: int) -> None:
    recycled = RecycledLogits(100)
    for token in range(60):
        recycled.put((token,), entry(token))
    recycled.resize(bound)
    assert recycled.max_entries == bound
    kept = [token for token in range(60) if recycled.get((token,)) is not None]
    assert kept == list(range(60 - num_kept, 60))
    recycled.put((77,), entry(1))
    assert recycled.get((77,)) == entry(1)
    assert len(recycled) <= bound
