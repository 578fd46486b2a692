"""What a token is worth in each row: most in the row that ends last."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.engine.budget import Budget
from hf_specdec.engine.cost_model import SIZES, StepCosts
from hf_specdec.engine.row_worth import row_worths
from hf_specdec.tree import DraftTree


def row(emitted: int, left: int, *, finished: bool = False) -> Any:
    text = SimpleNamespace(prompt_length=10)
    return SimpleNamespace(finished=finished, tokens_left=left, length=10 + emitted, text=text)


def test_rows_that_need_as_many_steps_are_worth_the_same() -> None:
    assert row_worths([row(12, 28), row(12, 28), row(12, 28)]) == pytest.approx([1.0, 1.0, 1.0])


def test_the_row_that_is_behind_is_worth_most_and_the_mean_is_one() -> None:
    ahead, behind, between = row_worths([row(30, 10), row(12, 28), row(20, 20)])
    assert behind > between > ahead > 0.0
    assert ahead + behind + between == pytest.approx(3.0)


def test_a_slow_row_with_a_short_way_to_go_counts_less_than_a_fast_one_with_a_long_way() -> None:
    slow, fast = row_worths([row(10, 5), row(20, 100)])
    assert slow < fast


def test_ended_rows_are_worth_nothing() -> None:
    assert row_worths([row(12, 28), row(3, 37, finished=True), row(12, 28)]) == pytest.approx([1.0, 0.0, 1.0])
    assert row_worths([row(12, 28), row(3, 37, finished=True)]) == [1.0, 0.0]


def test_where_nothing_bounds_a_text_all_rows_are_worth_the_same() -> None:
    assert row_worths([row(30, 0), row(10, 0)]) == [1.0, 1.0]


def test_drafts_are_verified_where_the_row_behind_gains_by_them() -> None:
    """What the row ahead would gain does not pay for the batch's wider forward."""
    costs = StepCosts(0.3)
    curve = costs.curve(2)
    curve.set({size: 1.0 + 0.25 * (size - 1) for size in SIZES})
    curve.seconds_of_one = 1.0
    sure = DraftTree.chain(1, range(2, 5)).with_probabilities((1.0, 0.9, 0.8, 0.7))
    vain = DraftTree.chain(1, range(2, 5)).with_probabilities((1.0, 0.05, 0.01, 0.0))
    trees, worths = [sure, vain], row_worths([row(30, 10), row(12, 28)])
    assert len(Budget(costs, max_nodes=8).cut(trees, 2)[0]) == 4
    assert len(Budget(costs, max_nodes=8).cut(trees, 2, worths)[0]) == 1
    assert len(Budget(costs, max_nodes=8).cut(trees[::-1], 2, worths)[0]) == 4
