"""What forwards cost: curves by points, corrected by what is seen, kept in files."""

import copy
import random
from unittest import mock

import numpy as np
import pytest
import torch

from hf_specdec.engine.cost import cost_model as module
from hf_specdec.engine.cost.cost_model import SIZES, CostCurve, DraftSpeed, StepCosts
from hf_specdec.forward.networks import runner_base
from hf_specdec.forward.networks.runner_base import network_of
from hf_specdec.methods.common.drafter import TOKEN_COST


def linear(slope: float = 0.1) -> CostCurve:
    return CostCurve(slope)


def learn(curve: CostCurve, seconds: dict[int, float]) -> None:
    """Let a curve be known at some of its sizes, with lines in between."""
    curve.ratios = np.interp(SIZES, list(seconds), [taken / seconds[1] for taken in seconds.values()]).tolist()
    curve.counts = [32 * (size in seconds) for size in SIZES]
    curve._slopes = {}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 11, 64, 100, 128, 200])
def test_between_and_beyond_its_points_a_curve_is_made_of_lines(size: int) -> None:
    assert linear(0.25).ratio(size) == pytest.approx(1.0 + 0.25 * (size - 1))


@pytest.mark.parametrize(
    ("times", "limit", "expected"),
    [
        ({1: 1.0, 8: 1.7}, 8, 0.1),
        ({1: 1.0, 2: 1.7, 8: 1.88, 16: 2.12, 64: 3.56}, 65, 0.03),
        ({1: 1.0, 2: 1.7, 8: 1.4, 64: 1.9}, 65, 0.0),
        ({1: 1.0, 64: 0.9}, 65, 0.0),
        ({1: 1.0, 2: 1.3}, 2, 0.3),
    ],
)
def test_the_least_that_a_token_adds_at_some_size(times: dict[int, float], limit: int, expected: float) -> None:
    curve = linear(0.0)
    learn(curve, times)
    assert curve.least_slope(limit) == pytest.approx(expected, abs=1e-9)


def test_what_is_seen_moves_the_curve_towards_it() -> None:
    curve = linear(0.1)
    curve.observe(1, 0.01)
    assert curve.seconds_of_one == pytest.approx(0.01)
    before = curve.ratio(8)
    curve.observe(8, 0.01 * before * 1.5)
    assert before < curve.ratio(8) < 1.3 * before
    assert curve.ratio(32) == pytest.approx(linear(0.1).ratio(32), rel=0.3)
    for _ in range(400):
        curve.observe(1, 0.01)
        curve.observe(8, 0.04)
    assert curve.seconds_of_one * curve.ratio(8) == pytest.approx(0.04, rel=0.03)
    assert curve.seconds_of_one == pytest.approx(0.01, rel=0.03)


def test_a_step_that_was_disturbed_counts_as_twice_as_long_at_most() -> None:
    disturbed, twice = linear(), linear()
    for curve, seconds in ((disturbed, 100.0), (twice, 2 * 0.01 * linear().ratio(8))):
        curve.observe(1, 0.01)
        curve.observe(8, seconds)
    assert disturbed.ratio(8) == pytest.approx(twice.ratio(8))
    assert disturbed.seconds_of_one == pytest.approx(twice.seconds_of_one)


def test_rows_share_the_curve_of_the_next_power_of_two() -> None:
    costs = StepCosts(0.1)
    assert costs.curve(3) is costs.curve(4)
    assert len({id(costs.curve(rows)) for rows in (1, 2, 3, 5)}) == 4


def test_rows_that_leave_a_batch_take_its_curve_along() -> None:
    """Where time depends on tokens alone, four rows of 8 tokens take what eight rows of 4 take."""
    costs = StepCosts(0.3)
    assert costs.curve(1).ratio(2) == pytest.approx(1.3)
    assert costs.curve(2).ratio(2) == pytest.approx(1.9 / 1.3)  # four tokens over two
    many = costs.curve(8)
    learn(many, {1: 0.02, 2: 0.022, 4: 0.03, 16: 0.08, 128: 0.5})
    many.seconds_of_one = 0.02
    few = costs.curve(4)
    assert few.seconds_of_one == pytest.approx(0.02 * 0.95)
    assert few.ratio(1) == 1.0
    assert [few.ratio(size) * 0.95 for size in (2, 4, 8)] == pytest.approx([many.ratio(size) for size in (1, 2, 4)])
    few.observe(4, 0.5)
    assert many.ratio(2) == pytest.approx(1.1)


@pytest.mark.parametrize("after", [1, 60])
def test_a_first_token_that_was_disturbed_is_corrected_by_the_next_three(after: int) -> None:
    """Steps of several tokens between them tell what they take, and not what one would have taken."""
    curve = linear(0.045)
    curve.observe(1, 0.018)
    for size in range(after):
        curve.observe((8, 12, 16)[size % 3], 0.01 * (1.0 + 0.045 * (7, 11, 15)[size % 3]))
    for _ in range(3):
        curve.observe(1, 0.01)
    assert curve.seconds_of_one == pytest.approx(0.01, rel=0.15)
    assert curve.ratio(12) == pytest.approx(1.0 + 0.045 * 11, rel=0.2)


def test_a_long_life_wears_no_estimate_out() -> None:
    """Thousands of noisy steps of two sizes, then another machine, which a few steps of the same sizes tell."""
    curve, rng = linear(0.1), random.Random(0)
    for _ in range(5_000):
        size = rng.choice([1, 8])
        curve.observe(size, 0.01 * (1.0 + 0.2 * (size == 8)) * rng.uniform(0.9, 1.1))
    assert curve.ratio(8) == pytest.approx(1.2, rel=0.05)
    assert 1.2 < curve.ratio(16) < linear(0.1).ratio(16), "sizes that were never seen follow those that were"
    for _ in range(300):
        size = rng.choice([1, 8])
        curve.observe(size, 0.02 * (1.0 + 0.5 * (size == 8)) * rng.uniform(0.9, 1.1))
    assert curve.seconds_of_one == pytest.approx(0.02, rel=0.1)
    assert curve.ratio(8) == pytest.approx(1.5, rel=0.1)


def test_a_draft_network_s_speed_is_learned_from_two_steps() -> None:
    speed = DraftSpeed()
    speed.observe(measured=60.0, assumed=0.2)
    assert speed.factor == 1.0, "a single step may have been disturbed"
    speed.observe(measured=0.6, assumed=0.2)
    assert speed.factor == pytest.approx(3.0)
    for _ in range(20):
        speed.observe(measured=0.4, assumed=0.2)
    assert speed.factor == pytest.approx(2.0)
    for _ in range(4):
        speed.observe(measured=60.0, assumed=0.2)
    assert speed.factor == pytest.approx(2.0)


def test_a_token_is_assumed_to_cost_the_same_whatever_the_clock_says() -> None:
    costs = StepCosts.of_device(torch.device("cpu"))
    assert costs.token_cost(1, 4, dtype=torch.float32) == TOKEN_COST
    learn(costs.curve(1), {1: 1.0, 8: 1.07})
    assert costs.token_cost(1, 4, dtype=torch.float32) == TOKEN_COST
    assert StepCosts.of_device(torch.device("cuda")).token_cost(1, 4, dtype=torch.float32) < TOKEN_COST / 4


def test_a_token_is_assumed_to_cost_less_where_weights_are_brought_in_for_each_forward() -> None:
    costs = StepCosts.of_device(torch.device("cpu"), loading=4.0)
    assert costs.token_cost(1, 4, dtype=torch.float32) == TOKEN_COST / 4
    assert costs.jump(1, torch.float32) == StepCosts.of_device(torch.device("cpu")).jump(1, torch.float32) / 4


def test_a_token_of_a_small_forward_of_halves_is_assumed_to_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the processor has instructions for them; the tokens of all rows count."""
    costs = StepCosts.of_device(torch.device("cpu"))
    monkeypatch.setattr(module, "computes_halves", lambda dtype: False)
    assert costs.token_cost(1, 4, dtype=torch.bfloat16) == TOKEN_COST
    monkeypatch.setattr(module, "computes_halves", lambda dtype: True)
    assert costs.token_cost(1, 10, dtype=torch.bfloat16) < TOKEN_COST == costs.token_cost(1, 16, dtype=torch.bfloat16)
    two, four = (costs.token_cost(num_rows, 4, dtype=torch.bfloat16) for num_rows in (2, 4))
    assert two < costs.token_cost(2, 4, dtype=torch.float32) < four == costs.token_cost(4, 4, dtype=torch.float32)


def test_several_tokens_are_assumed_to_cost_extra_where_one_alone_is_a_vector_in_fp32_on_a_cpu() -> None:
    cpu, cuda = (StepCosts.of_device(torch.device(name)) for name in ("cpu", "cuda"))
    assert cpu.jump(1, torch.float32) > 5 * cpu.token_cost(1, 4, dtype=torch.float32)
    assert cpu.jump(2, torch.float32) == cpu.jump(1, torch.bfloat16) == cuda.jump(1, torch.float32) == 0.0


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_token_more_a_row_costs_what_so_many_tokens_add_to_a_forward(num_rows: int) -> None:
    costs = StepCosts.of_device(torch.device("cpu"))
    slope = costs.token_cost(1, 4, dtype=torch.float32)
    forward_of_one_each, forward_of_two_each = (1.0 + slope * (tokens - 1) for tokens in (num_rows, 2 * num_rows))
    result = costs.token_cost(num_rows, 4, dtype=torch.float32)
    assert result == pytest.approx(forward_of_two_each / forward_of_one_each - 1.0)


def test_networks_whose_speeds_are_kept_are_bounded_and_told_apart() -> None:
    """Another module at the address of one that has ended, and a copy, are other networks."""
    costs = StepCosts(0.1)
    for network in range(200):
        costs.draft_speed(network).observe(1.0, 2.0)
    assert 199 in costs.draft_speeds
    assert len(costs.draft_speeds) < 100
    first = torch.nn.Linear(1, 1)
    assert network_of(first) == network_of(first)
    assert network_of(copy.deepcopy(first)) != network_of(first)
    other = torch.nn.Linear(1, 1)
    with mock.patch.object(runner_base, "id", lambda _: 1, create=True):
        assert network_of(first) != network_of(other)
