"""Recycled logits: the newest entry under each ending, in bounded memory."""

import math
import pickle

import numpy as np
import pytest
import torch

from hf_specdec.methods.auto.recycled_logits import (
    FLOOR,
    LAST_STAMP,
    NUM_KEPT,
    NUM_LIKELIEST,
    Entry,
    RecycledLogits,
    best_tokens,
    log_odds,
)
from hf_specdec.methods.common.node_logits import NodeLogits
from tests.native import recycled as recycled_table
from tests.native.recycled import key_of, put


def entry(token: int) -> Entry:
    return [token], [1.0]


def get(recycled: RecycledLogits, *key: int) -> Entry | None:
    return recycled_table.get(recycled, key_of(key))


def test_an_entry_is_found_under_every_ending_of_its_tokens() -> None:
    recycled = RecycledLogits(100)
    put(recycled, (5, 6, 7), entry(1))
    assert [get(recycled, *key) for key in ((7,), (6, 7), (5, 6, 7))] == [entry(1)] * 3
    assert [get(recycled, *key) for key in ((5,), (5, 6), (4, 6, 7))] == [None] * 3


def test_the_newest_entry_counts() -> None:
    recycled = RecycledLogits(100)
    put(recycled, (5, 6), entry(1))
    put(recycled, (8, 6), entry(2))
    assert get(recycled, 6) == entry(2)
    assert get(recycled, 5, 6) == entry(1)


def test_where_there_is_no_room_the_entry_not_written_for_longest_leaves() -> None:
    recycled = RecycledLogits(4)
    for token in (1, 2, 3, 4, 1, 5):
        put(recycled, (token,), entry(token))
    assert [token for token in range(1, 6) if get(recycled, token) is not None] == [1, 3, 4, 5]


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 2, 1, 3)])
def test_time_has_no_end(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps have 32 bits: a memory that is written to for months numbers them anew, and forgets in the same order."""
    recycled = RecycledLogits(4)
    put(recycled, (9,), entry(9))
    monkeypatch.setattr(recycled, "clock", LAST_STAMP - 2)
    for token in order:
        put(recycled, (token,), entry(token))
    assert recycled.export()["stamps"].max() < 10
    for number, token in enumerate(order):
        assert get(recycled, token) == entry(token)
        put(recycled, (10 + number,), entry(0))
        assert get(recycled, token) is None


def test_rows_of_one_batch_keep_each_other() -> None:
    """Keys that would choose one place all find another, and of equal keys the last one counts."""
    recycled = RecycledLogits(60)
    keys = np.array([key_of((token,)) for token in [*range(40), 7]])
    tokens = np.arange(41).repeat(NUM_KEPT).reshape(41, NUM_KEPT)
    recycled_table.put_rows(recycled, keys, tokens, np.ones((41, NUM_KEPT)))
    assert len(recycled) == 40
    entries = [recycled_table.get(recycled, int(key)) for key in keys[:40]]
    assert [entry and entry[0][0] for entry in entries] == [*range(7), 40, *range(8, 40)]


def test_an_entry_takes_less_than_150_bytes() -> None:
    recycled = RecycledLogits(262_144)
    arrays = [value for value in vars(recycled).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 150 * 262_144 < 40e6


@pytest.mark.parametrize("bound", [6, 7, 50, 301])
def test_it_never_holds_more_than_its_bound(bound: int) -> None:
    recycled = RecycledLogits(bound)
    most = 0
    for token in range(4 * bound):
        put(recycled, (token, token + 1, token + 2), entry(0))
        most = max(most, len(recycled))
    assert 0.6 * bound < most <= bound


@pytest.mark.parametrize("vocab_size", [3, NUM_LIKELIEST, 50])
def test_the_best_tokens_come_with_their_log_odds(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size)
    for row, (tokens, evidence) in zip(logits, best_tokens(NodeLogits(logits)), strict=True):
        shares = row.softmax(-1)
        order = shares.argsort(descending=True)[:NUM_LIKELIEST].tolist()
        assert list(tokens) == order
        expected = [max(0.0, math.log(float(shares[token] / (1 - shares[token]))) + FLOOR) for token in order]
        assert list(evidence) == pytest.approx(expected, abs=1e-4)


def test_evidence_is_bounded_at_both_ends() -> None:
    evidence = log_odds(np.array([0.0, math.nan, 1e-4, 0.5, 1.0]))
    assert evidence.tolist() == pytest.approx([0.0, 0.0, 0.0, FLOOR, FLOOR + math.log(1e6)], abs=1e-3)
    assert len(set(log_odds(np.array([0.0, math.nan]), floor=-7.0).tolist())) == 1, "no number is no chance"


def test_it_is_copied_with_what_it_holds() -> None:
    recycled = RecycledLogits(100)
    put(recycled, (5, 6), entry(1))
    other = pickle.loads(pickle.dumps(recycled))
    put(other, (5, 6), entry(2))
    assert (get(recycled, 6), get(other, 6)) == (entry(1), entry(2))
