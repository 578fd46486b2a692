"""The budget: as many nodes as bring more tokens than their time, by known curves and times."""

import itertools
import math

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.cost.budget import (
    BATCH_MARGIN,
    EXPLORE_EVERY,
    EXPLORE_SHARE,
    FADE,
    FIRST_CREDIT,
    FIRST_STEPS,
    LEAST_CREDIT,
    LIKELY_TOKENS,
    LONGEST_PAUSE,
    RETRY,
    RETRY_SIZE,
    SHORTEST_PAUSE,
    TILE,
    Budget,
)
from hf_specdec.engine.cost.cost_model import ORDER, SIZES, StepCosts
from hf_specdec.forward.networks.runner_base import DraftForwards
from hf_specdec.methods.common.drafter import DraftCost
from tests.engine.test_cost_model import learn

ONE = 0.01  # seconds of a step with one token
FLAT, STEEP = 0.0, 1.0  # what a token more costs, in steps of one


def budget_of(slope: float, *, rows: int = 1, max_nodes: int = 64, widths: tuple[int, ...] = ()) -> Budget:
    curve = (costs := StepCosts(0.3)).curve(rows)
    learn(curve, {size: ONE * (1.0 + (size - 1) * slope) for size in SIZES})
    curve.seconds_of_one = ONE
    return Budget(costs, max_nodes=max_nodes, widths=widths)


def chain(*probabilities: float) -> DraftTree:
    return DraftTree.chain(1, range(2, 2 + len(probabilities))).with_probabilities((1.0, *probabilities))


def step(budget: Budget, probability: float, *, num_tokens: int, drafting: float) -> list[DraftTree] | None:
    """One step of one row; `None` where the drafter was paused."""
    if budget.draft_cost(1, 1, 0).of_node == math.inf:
        budget.record([DraftTree.chain(1)], 1, num_tokens=1, seconds=ONE, draft_seconds=0.0)
        return None
    trees = budget.cut([chain(*[probability ** (depth + 1) for depth in range(8)])], 1)
    seconds = ONE * budget.costs.curve(1).ratio(len(trees[0]))
    budget.record(trees, 1, num_tokens=num_tokens, seconds=seconds, draft_seconds=drafting)
    return trees


@pytest.mark.parametrize(("slope", "expected"), [(FLAT, 10), (0.02, 8), (0.1, 4), (0.35, 2), (0.7, 1)])
def test_nodes_are_taken_as_long_as_they_are_worth_their_time(slope: float, expected: int) -> None:
    (tree,) = budget_of(slope).cut([chain(0.6, 0.3, 0.1, 0.08, 0.07, 0.06, 0.05, 0.01, 0.001)], 1)
    assert len(tree) == expected


def test_a_forward_of_one_row_costs_whole_tiles() -> None:
    """Kernels compute tokens in tiles: a tile that pays is filled, and its first node has to gain the whole of it."""
    budget = budget_of(0.1)
    (filled,) = budget.cut([chain(0.6, 0.01, 0.001)], 1)
    assert len(filled) == 2, "a tile of four does not pay"
    (filled,) = budget.cut([chain(0.6, 0.3, 0.01)], 1)
    assert len(filled) == 4
    both = budget.cut([chain(0.6, 0.3, 0.01), chain(0.6, 0.3, 0.01)], 2)
    assert all(len(tree) < 4 for tree in both), "rows share tiles"


@pytest.mark.parametrize(("slope", "expected"), [(0.05, 4), (0.15, 4), (0.35, 2), (0.7, 1)])
def test_where_forwards_have_few_widths_a_step_fills_the_one_that_pays(slope: float, expected: int) -> None:
    """Three nodes cost what four do."""
    (tree,) = budget_of(slope, widths=(1, 2, 4, 8)).cut([chain(0.6, 0.3, 0.1, 0.01)], 1)
    assert len(tree) == expected


def test_a_jump_in_the_curve_is_taken_where_what_lies_behind_it_pays() -> None:
    """The second token costs a lot, the six behind it nothing: all or none."""
    budget = budget_of(FLAT)
    learn(budget.costs.curve(1), {1: ONE, 2: 1.8 * ONE, 8: 1.8 * ONE, 128: 9 * ONE})
    assert len(budget.cut([chain(0.7, 0.1)], 1)[0]) == 1
    assert len(budget.cut([chain(0.7, 0.1, 0.05)], 1)[0]) == 4


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_weighed_together_as_brute_force_would(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    budget = budget_of(0.02 + 0.02 * seed, rows=4)
    rows = [
        sorted(torch.rand(5 + 3 * row, generator=generator).tolist(), reverse=True)[: 4 + 3 * row] for row in range(4)
    ]
    curve = budget.costs.curve(4)
    values = [
        sum(sum(row[: size - 1]) for row in rows) - 4 * BATCH_MARGIN * budget.rate * (curve.ratio(size) - 1.0)
        for size in range(1, 15)
    ]
    best = 1 + max(range(len(values)), key=values.__getitem__)
    assert [len(tree) for tree in budget.cut([chain(*row) for row in rows], 4)] == [min(best, 1 + len(r)) for r in rows]


@pytest.mark.parametrize("seed", range(8))
def test_packed_rows_get_the_likeliest_nodes_of_all_as_brute_force_would(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    budget = budget_of(0.02 + 0.02 * seed, rows=4)
    rows = [sorted(torch.rand(4 + 3 * row, generator=generator).tolist(), reverse=True) for row in range(4)]
    chances, curve = sorted(itertools.chain(*rows), reverse=True), budget.costs.curve(4)
    values = [
        sum(chances[:count]) - 4 * BATCH_MARGIN * budget.rate * (curve.ratio(math.ceil((4 + count) / TILE)) - 1.0)
        for count in range(len(chances) + 1)
    ]
    best = max(range(len(values)), key=values.__getitem__)
    least = chances[best - 1] if best else math.inf
    cut = budget.cut([chain(*row) for row in rows], 4, packs=True)
    assert [len(tree) for tree in cut] == [1 + sum(chance >= least for chance in row) for row in rows]
    budget.record(cut, 4, num_tokens=4, seconds=ONE, draft_seconds=0.0)
    assert budget.rate == pytest.approx(
        max(1.0, (FIRST_STEPS * FADE + 1) / (FIRST_STEPS * FADE + curve.ratio(math.ceil(sum(map(len, cut)) / TILE))))
    )


def test_a_good_rate_makes_nodes_dearer() -> None:
    """Where drafts bring three tokens a step anyway, unlikely nodes are not worth their time any more."""
    budget = budget_of(0.1)
    drafted = chain(0.9, 0.3, 0.15, 0.1)
    before = len(budget.cut([drafted], 1)[0])
    for _ in range(100):
        budget.record([chain(0.9, 0.8)], 1, num_tokens=3, seconds=1.2 * ONE, draft_seconds=0.0)
    assert budget.rate == pytest.approx(2.5, rel=0.1)
    assert len(budget.cut([drafted], 1)[0]) == 2 < before


def test_now_and_then_a_small_tree_is_tried_where_none_pays() -> None:
    budget = budget_of(STEEP)
    sizes = [len(budget.cut([chain(0.9, 0.8, 0.7, 0.6)], 1)[0]) for _ in range(2 * RETRY)]
    assert [place for place, size in enumerate(sizes, 1) if size > 1] == [RETRY, 2 * RETRY]
    assert max(sizes) == RETRY_SIZE


def test_drafters_are_told_what_a_node_has_to_gain() -> None:
    budget = budget_of(0.1)
    learn(budget.costs.curve(1), {size: ONE * (1.0 + 0.5 * (size > 1) + (size - 1) * 0.1) for size in SIZES})
    budget.has_read(200, 4 * ONE)
    cost = budget.draft_cost(1, 1, 100)
    assert cost == DraftCost(
        of_node=pytest.approx(0.1), of_nodes=cost.of_nodes, of_forward=1.0, of_reading=0.02, num_steps=100.0
    )
    assert [cost.of_nodes(count) for count in (0, 1, 3, 7)] == pytest.approx([0.0, 0.6, 0.8, 1.2])
    assert budget.draft_cost(1, 1, 100_000).num_steps == LIKELY_TOKENS


def test_nodes_have_to_gain_what_the_curve_says_at_their_place() -> None:
    """Forwards of 2 to 8 tokens take as long as one another, those of 16 half as long again."""
    budget = budget_of(0.1)
    flat = {1: 1.0, 2: 1.19, 4: 1.19, 8: 1.19, 16: 1.81, 32: 3.0, 64: 5.4}
    learn(budget.costs.curve(1), {size: ONE * ratio for size, ratio in flat.items()})
    cost = budget.draft_cost(1, 1, 100)
    assert cost.of_node == 0.0, "some of them are free, so that all are looked at"
    assert [cost.of_nodes(count) for count in (1, 7, 15)] == pytest.approx([0.19, 0.19, 0.81])


def test_a_draft_network_s_time_is_no_cost_of_the_other_sources() -> None:
    """It reads a prompt in the time of thirty steps, then takes half a step each time: no one is paused for that."""
    budget = budget_of(0.02)
    before = budget.draft_cost(1, 1, 100, "network").of_node
    for number in range(40):
        forwards = DraftForwards()
        forwards.add((0.5 if number else 30.0) * ONE, 0.25, 0 if number else 1_000)
        budget.draft_cost(1, 1, 100, "network")
        trees = budget.cut([chain(0.6, 0.3)], 1)
        seconds = forwards.seconds + 0.01 * ONE
        budget.has_drafted(forwards, 1)
        budget.record(trees, 1, num_tokens=1, seconds=1.04 * ONE, draft_seconds=seconds, forwards=forwards)
    assert budget.draft_cost(1, 1, 100, "network").of_node <= budget.rate * (before + 0.011)
    assert budget.draft_cost(1, 1, 100, "network").of_forward == pytest.approx(2.0 * budget.rate, rel=0.05)
    assert budget.draft_cost(1, 1, 100, "another").of_forward == pytest.approx(budget.rate)


def test_the_second_step_of_a_new_model_verifies_one_token_to_learn_what_that_costs() -> None:
    budget, sizes = Budget(StepCosts(0.045), max_nodes=64), []
    for done in range(4):
        budget.draft_cost(1, 1, 64 - done)
        (tree,) = budget.cut([chain(*[0.9**depth for depth in range(1, 1 + budget.max_draft)])], 1)
        budget.record([tree], 1, num_tokens=2, seconds=ONE * (1.0 + 0.9 * (len(tree) > 1)), draft_seconds=0.0)
        sizes.append(len(tree))
    assert sizes[1] == 1
    assert sizes[0] > 1
    assert budget.costs.curve(1).seconds_of_one == pytest.approx(ONE, rel=0.3)


def test_sizes_that_cost_more_than_assumed_are_not_tried_one_after_the_other() -> None:
    """Each takes a second step's time: a call of 64 tokens tries two, the second believed to cost next to nothing."""
    budget, tried = Budget(StepCosts(0.045), max_nodes=64), 0
    for done in range(64):
        cost = budget.draft_cost(1, 1, 64 - done)
        most = budget.max_draft if cost == DraftCost(of_node=0.0, of_forward=math.inf) else 1
        (tree,) = budget.cut([chain(*[0.01] * most)], 1)
        tried += len(tree) > 1
        budget.record([tree], 1, num_tokens=1, seconds=ONE * (1.0 + (len(tree) > 1)), draft_seconds=0.0)
    assert tried == 2


def pauses(budget: Budget, steps: int, **how: float) -> list[int]:
    """Lengths of the pauses in so many steps."""
    result, length = [], 0
    for _ in range(steps):
        if step(budget, how["probability"], num_tokens=1, drafting=how["drafting"]) is None:
            length += 1
        elif length:
            result.append(length)
            length = 0
    return result


def test_drafters_are_paused_where_drafting_costs_more_than_it_gains_and_ever_longer() -> None:
    result = pauses(budget_of(0.5), 1_500, probability=0.05, drafting=0.2 * ONE)
    assert result[:3] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]
    assert max(result) == LONGEST_PAUSE


def test_a_first_pause_comes_when_so_much_is_lost_and_no_sooner() -> None:
    """Plain decoding's rate is 1, so a step loses what its drafting takes."""
    budget = budget_of(0.5)
    taken = [step(budget, 0.0, num_tokens=1, drafting=0.1 * ONE) for _ in range(40)]
    assert taken.index(None) == pytest.approx(FIRST_CREDIT / 0.1 + 1, abs=2)


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (2, 0.5), (8, LEAST_CREDIT)])
def test_many_rows_are_paused_sooner(rows: int, share: float) -> None:
    """Each step shows as many times what drafting is worth; what it takes for all of them is the loss of each."""
    budget = budget_of(0.5, rows=rows)
    count = 0
    while budget.draft_cost(rows, rows, 0).of_node < math.inf:
        trees = budget.cut([chain(0.01)] * rows, rows)
        budget.record(trees, rows, num_tokens=rows, seconds=ONE, draft_seconds=0.1 * ONE)
        count += 1
    assert count == pytest.approx(FIRST_CREDIT * share / 0.1 + 1, abs=2)


@pytest.mark.parametrize(("rows", "first"), [(1, SHORTEST_PAUSE), (4, 4 * SHORTEST_PAUSE), (64, LONGEST_PAUSE)])
def test_pauses_of_many_rows_are_longer(rows: int, first: int) -> None:
    """What a try costs grows with the rows that draft, so they try as often as one of them would."""
    budget = budget_of(0.5, rows=rows)
    paused = []
    while paused.count(True) == 0 or paused[-1]:
        paused.append(budget.draft_cost(rows, rows, 0).of_node == math.inf)
        trees = [DraftTree.chain(1)] * rows if paused[-1] else budget.cut([chain(0.01)] * rows, rows)
        drafting = 0.0 if paused[-1] else 0.4 * ONE
        budget.record(trees, rows, num_tokens=rows, seconds=ONE, draft_seconds=drafting)
    assert paused.count(True) == first


@pytest.mark.parametrize(("slope", "probability", "tokens", "share"), [(0.5, 0.0, 1, 0.01), (0.02, 0.8, 3, 0.05)])
def test_a_small_loss_or_a_gain_is_no_reason_to_pause(
    slope: float, probability: float, tokens: int, share: float
) -> None:
    budget = budget_of(slope)
    assert None not in [step(budget, probability, num_tokens=tokens, drafting=share * ONE) for _ in range(600)]


def test_after_a_pause_a_text_that_can_be_drafted_again_is() -> None:
    budget = budget_of(0.02)
    assert pauses(budget, 600, probability=0.01, drafting=0.3 * ONE)
    assert None not in [step(budget, 0.9, num_tokens=4, drafting=0.05 * ONE) for _ in range(600)][LONGEST_PAUSE:]
    worse = pauses(budget, 400, probability=0.01, drafting=0.3 * ONE)
    assert worse[0] == SHORTEST_PAUSE


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
