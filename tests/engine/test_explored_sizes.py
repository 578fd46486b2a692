"""Steps of sizes that no one knows the cost of: few of a call's time, and what later calls know of them."""

import pytest

from hf_specdec.engine.cost.budget import EXPLORE_EVERY, EXPLORE_SHARE, RETRY, RETRY_SIZE, Budget
from hf_specdec.engine.cost.cost_model import ORDER, StepCosts
from tests.engine.test_budget import ONE, chain


def decode(budget: Budget, num_tokens: int, slope: float) -> list[int]:
    """A call of so many tokens, one a step, drafts of 64 likely nodes and more; returns the sizes of its steps."""
    sizes = []
    for done in range(num_tokens):
        cost = budget.draft_cost(1, 1, num_tokens - done)
        most = 64 if cost.of_node < 1.0 else 0
        (tree,) = budget.cut([chain(*[0.005] * most)], 1)
        seconds = ONE * (1.0 + slope * (len(tree) - 1))
        budget.record([tree], 1, num_tokens=1, seconds=seconds, draft_seconds=0.0)
        sizes.append(len(tree))
    return sizes


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 600])
def test_a_call_spends_little_of_its_time_on_unknown_sizes(num_tokens: int, slope: float) -> None:
    """A share of the whole call, what the first of them cost more than assumed, and the small trees of `RETRY`."""
    sizes = decode(Budget(StepCosts(0.045), max_nodes=64), num_tokens, slope)
    added, retried = slope * sum(size - 1 for size in sizes), (RETRY_SIZE - 1) * num_tokens / RETRY
    assert added <= max(1.0, slope / 0.045) * EXPLORE_SHARE * num_tokens + slope * (10 + retried)
    if slope >= 0.05:  # else larger trees pay
        assert sum(size > 2 for size in sizes) <= num_tokens / EXPLORE_EVERY + num_tokens / RETRY + 1


@pytest.mark.parametrize("slope", [0.005, 0.045])
def test_a_long_call_learns_what_every_size_costs(slope: float) -> None:
    budget = Budget(StepCosts(0.02), max_nodes=64)
    sizes = decode(budget, 2_000, slope)
    assert set(ORDER) <= set(sizes)
    curve = budget.costs.curve(1)
    assert curve.unknown(65) == []
    fresh = StepCosts(0.02).curve(1)
    for size in (8, 32, 64):
        true = 1.0 + slope * (size - 1)
        assert abs(curve.ratio(size) - true) < 0.7 * abs(fresh.ratio(size) - true)


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5])
def test_short_calls_leave_costs_that_later_ones_can_use(num_tokens: int) -> None:
    """Ten warm-up calls, their steps three times as long as assumed or a tenth: nothing is settled by them."""
    costs = StepCosts(0.045)
    for _ in range(10):
        decode(Budget(costs, max_nodes=64), num_tokens, slope=0.02)
    curve = costs.curve(1)
    assert curve.ratio(64) == pytest.approx(1.0 + 0.045 * 63, rel=0.5)
    assert len(decode(Budget(costs, max_nodes=64), 600, slope=0.02)) == 600
    assert curve.ratio(32) == pytest.approx(1.0 + 0.02 * 31, rel=0.35)
