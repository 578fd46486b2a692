"""Forwards are timed by the clock, size by size, and the cache is left as it was."""

from typing import Any

import pytest
import torch

from hf_specdec import DraftTree
from hf_specdec.engine.cost.cost_model import ORDER, CostCurve
from hf_specdec.tools.bench import forward_times
from hf_specdec.tools.bench.forward_times import time_forwards

HOW: dict[str, Any] = {"largest": 64, "seconds": 0.4, "rounds": 5}


class Clocked:
    """A target whose forwards take the time that `cost` says, on a clock of their own."""

    def __init__(self, cost: Any, tier: str = "tree") -> None:
        self.cost, self.tier, self.now = cost, tier, 0.0
        self.sizes: list[int] = []
        self.trees: list[DraftTree] = []
        self.committed: list[list[list[int]]] = []

    def forward(self, trees: list[DraftTree]) -> list[torch.Tensor]:
        size = max(map(len, trees))
        self.sizes.append(size)
        self.trees += trees
        self.now += self.cost(size)
        return [torch.zeros(size, 5) for _ in trees]

    def commit(self, paths: list[list[int]]) -> None:
        self.committed.append(paths)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(cost: Any, tier: str = "tree") -> Clocked:
        target = Clocked(cost, tier)
        monkeypatch.setattr(forward_times.time, "perf_counter", lambda: target.now)
        return target

    return make


@pytest.mark.parametrize("tier", ["tree", "chain"])
def test_measuring_finds_what_forwards_take_and_keeps_no_token(clocked: Any, tier: str) -> None:
    target, curve = clocked(lambda size: 1e-3 * (1.0 + 0.02 * size), tier), CostCurve(0.1)
    found = time_forwards(target, curve, [3, 4], vocab_size=40, **HOW)
    assert found[8] == pytest.approx(1e-3 * 1.16)
    assert curve.ratio(48) == pytest.approx((1.0 + 0.02 * 48) / 1.02)
    assert set(target.sizes) == set(ORDER)
    assert target.committed == [[[], []]] * len(target.sizes)
    assert [tree.tokens[0] for tree in target.trees[:2]] == [3, 4]
    assert all(0 <= token < 40 for tree in target.trees for token in tree.tokens)
    assert all(tree.is_chain for tree in target.trees if len(tree) > 2) == (tier == "chain")


def test_measuring_ends_in_time(clocked: Any) -> None:
    target, curve = clocked(lambda size: 0.1), CostCurve(0.0)
    curve.observe(1, 0.1)
    time_forwards(target, curve, [3], vocab_size=40, **{**HOW, "seconds": 0.35})
    assert target.sizes == [1, 8, 32]
    assert curve.is_measured


def test_a_forward_too_slow_to_be_measured_is_not_called_measured(clocked: Any) -> None:
    target, curve = clocked(lambda size: 3.0), CostCurve(0.1)
    curve.observe(1, 3.0)
    time_forwards(target, curve, [3], vocab_size=5, **HOW)
    assert target.sizes == []
    assert not curve.is_measured
    assert curve.ratio(8) == pytest.approx(1.7)


def test_measuring_stays_within_the_room_there_is(clocked: Any) -> None:
    target = clocked(lambda size: 1e-3)
    time_forwards(target, CostCurve(0.1), [3], vocab_size=50, **{**HOW, "largest": 10})
    assert set(target.sizes) == {1, 2, 4, 8}


def test_a_vocabulary_too_small_for_a_tree_of_a_size_is_not_timed_at_it(clocked: Any) -> None:
    """A smaller tree's time must not be taken for that of the size that was wanted."""
    target = clocked(lambda size: 1e-3 * size)
    found = time_forwards(target, CostCurve(0.1), [3], vocab_size=5, **HOW)
    assert set(target.sizes) == set(found) == {1, 2, 4, 8}
