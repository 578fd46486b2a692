"""Steps verify the sizes that are asked for, all rows alike, and the curve of a file comes of their times."""

import itertools
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.tools.bench import tuning
from hf_specdec.tools.bench.forward_times import time_steps
from hf_specdec.tools.bench.tuning import measure_costs
from tests.helpers.zoo import FALLBACK, FAMILIES, build


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("rows", [1, 2])
def test_steps_have_the_sizes_that_are_asked_for(family: str, rows: int) -> None:
    model, asked, seen = build(FAMILIES[family]), [1, 8, 2, 5, 1], list[int]()
    time_steps(model, asked, lambda size, taken: seen.append(size), rows=rows, length=6, most_tokens=40)
    assert seen == asked


def test_trees_are_verified_where_the_model_can() -> None:
    model, widths = build(FAMILIES["llama"]), list[int]()

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(kwargs["position_ids"].unique().numel())

    with torch.no_grad():
        handle = model.register_forward_pre_hook(watch, with_kwargs=True)
        time_steps(model, [9], lambda size, taken: None, rows=1, length=6, most_tokens=20)
        handle.remove()
    assert 3 in widths, "a root, and branches two tokens long"


def test_sizes_are_timed_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = itertools.count(0.0, 0.1), dict[int, list[float]]()
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(clock))
    curve = hf_specdec.engine.cost.cost_model.CostCurve(0.0)
    found = []
    for size in tuning._sizes_in_time(times, curve, 0.35, 5):
        found.append(size)
        times.setdefault(size, []).append(0.01)
    assert found == [1, 8, 32]


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`seconds` must leave time for forwards of one token and of more"):
        measure_costs(build(FAMILIES["llama"]), context_length=8, seconds=1e-9, rounds=1)


def test_a_model_that_decodes_plainly_has_no_costs() -> None:
    model = build(FALLBACK["recurrent_gemma"])
    with pytest.raises(UnsupportedModelError, match="decodes without speculation"):
        time_steps(model, [1, 2], lambda size, taken: None, rows=1, length=6, most_tokens=20)
