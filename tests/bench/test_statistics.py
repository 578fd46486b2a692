"""The statistics say what numpy says, and speed is a ratio of calls that stood side by side."""

from typing import Any

import numpy as np
import pytest

from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.statistics import (
    mean_acceptance_length,
    median_with_interval,
    summarize,
)

ROWS = [{"name": REFERENCE}, {"name": "ours"}]


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_the_median_is_numpy_s(count: int) -> None:
    values = np.random.default_rng(0).lognormal(size=count)
    assert median_with_interval(values.tolist())["median"] == pytest.approx(np.median(values))


def test_the_interval_is_that_of_a_percentile_bootstrap() -> None:
    """Two independent sets of resamples agree to a few per cent of the interval's width."""
    generator = np.random.default_rng(1)
    values = generator.lognormal(size=60)
    picks = generator.integers(len(values), size=(4000, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    found = median_with_interval(values.tolist())
    assert found["low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert found["high"] == pytest.approx(high, abs=0.1 * (high - low))
    assert found["low"] <= found["median"] <= found["high"]


def test_the_interval_is_the_same_each_time() -> None:
    assert median_with_interval([1.0, 2.0, 4.0]) == median_with_interval([1.0, 2.0, 4.0])


def test_acceptance_leaves_out_the_prompt_s_forward() -> None:
    blocks = [{"blocks": [1, 3, 1]}, {"blocks": [5, 2]}]
    steps = np.array([3, 1, 2])
    assert mean_acceptance_length(blocks) == pytest.approx(steps.mean())
    assert mean_acceptance_length([{"blocks": [1]}]) == 1.0
    assert mean_acceptance_length([{"mean_acceptance_length": 2.0}, {"mean_acceptance_length": 3.0}]) == 2.5


def record(row: str, prompt: str, number: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "mode": "greedy",
        "round": number,
        "prompt": prompt,
        "task": "a" if prompt < "p" else "b",
        "turn": 0,
        "row": row,
        "num_tokens": 10,
        "seconds": seconds,
        "cpu_seconds": seconds,
        "draft_seconds": None if row == REFERENCE else seconds / 4,
        "plain_reason": None,
        "equal": True,
    } | changes


def test_a_prompt_s_ratio_is_the_median_of_its_rounds_and_a_row_s_that_of_its_prompts() -> None:
    """Ratios of 2, 4 and 8 on one prompt, 1 on another, 3 on a third; a machine that slows down changes nothing."""
    ratios = {"c": [2.0, 4.0, 8.0], "d": [1.0, 1.0, 1.0], "q": [3.0, 3.0, 3.0]}
    records = []
    for prompt, values in ratios.items():
        for number, ratio in enumerate(values):
            slow = 10.0**number
            records += [record(REFERENCE, prompt, number, ratio * slow), record("ours", prompt, number, slow)]
    speed = summarize(records, ROWS)["greedy"]["ours"]["speed"]
    assert {task: found["median"] for task, found in speed.items()} == {"a": 2.5, "b": 3.0, "overall": 3.0}
    assert speed["overall"]["count"] == 3


def test_a_batch_of_texts_that_end_at_once_has_no_speed() -> None:
    empty = [record(name, "c", 0, 1.0) | {"num_tokens": 0} for name in (REFERENCE, "ours")]
    others = [record(name, "d", 0, seconds) for name, seconds in ((REFERENCE, 4.0), ("ours", 1.0))]
    assert summarize([*empty, *others], ROWS)["greedy"]["ours"]["speed"]["overall"]["median"] == 4.0


def test_transformers_rows_are_compared_with_as_well() -> None:
    """Per prompt, and not as the quotient of two medians."""
    rows = [*ROWS, {"name": "theirs", "kind": "transformers"}]
    seconds = {"c": (8.0, 2.0, 1.0), "d": (8.0, 1.0, 4.0), "e": (8.0, 4.0, 2.0)}
    records = [
        record(row["name"], prompt, 0, value)
        for prompt, values in seconds.items()
        for row, value in zip(rows, values, strict=True)
    ]
    found = summarize(records, rows)["greedy"]["ours"]
    assert found["speed"]["overall"]["median"] == 4.0
    assert found["speed_against"]["theirs"]["overall"]["median"] == 0.5


def test_any_row_can_be_compared_with_by_task() -> None:
    rows = [*ROWS, {"name": "other", "kind": "method"}]
    seconds = {"c": (8.0, 2.0, 1.0), "d": (8.0, 1.0, 4.0), "q": (8.0, 4.0, 2.0)}
    records = [
        record(row["name"], prompt, 0, value)
        for prompt, values in seconds.items()
        for row, value in zip(rows, values, strict=True)
    ]
    assert not summarize(records, rows)["greedy"]["ours"]["speed_against"]
    found = summarize(records, rows, against=["other"])["greedy"]["ours"]["speed_against"]
    assert {task: ratio["median"] for task, ratio in found["other"].items()} == {"a": 2.25, "b": 0.5, "overall": 0.5}
    assert (found["other"]["a"]["low"], found["other"]["a"]["high"]) == (0.5, 4.0)


def probe(prompt: str, blocks: list[int], drafted: list[int]) -> dict[str, Any]:
    counts = {"blocks": blocks, "drafted": drafted, "peak_memory_bytes": None, "first_token_seconds": 1.0}
    return record("ours", prompt, -1, 0.0) | counts


def test_steps_are_counted_by_task_without_the_prompt_s_forward() -> None:
    probes = [probe("c", [1, 3, 1], [0, 8, 4]), probe("d", [1, 2], [0, 6]), probe("q", [1, 1], [9, 10])]
    found = summarize(probes, ROWS)["greedy"]["ours"]
    assert found["tokens_per_step"] == {"a": 2.0, "b": 1.0, "overall": 1.75}
    assert found["nodes_per_step"] == {"a": 6.0, "b": 10.0, "overall": 7.0}


def test_speed_is_counted_by_the_token() -> None:
    """Where a row ends earlier, its time is set against the tokens that it gave."""
    records = [record(REFERENCE, "c", 0, 1.0), record("ours", "c", 0, 0.5, num_tokens=5, equal=False)]
    found = summarize(records, ROWS)["greedy"]["ours"]
    assert found["speed"]["overall"]["median"] == pytest.approx(1.0)
    assert found["tokens_per_second"] == pytest.approx(10.0)


def test_one_unequal_round_makes_a_prompt_unequal() -> None:
    records = [
        record(row, prompt, number, 1.0, equal=row == REFERENCE or prompt == "d" or number == 0)
        for row in (REFERENCE, "ours")
        for prompt in ("c", "d")
        for number in range(2)
    ]
    assert summarize(records, ROWS)["greedy"]["ours"]["share_equal"] == 0.5


def test_the_draft_share_is_of_the_calls_that_count_it() -> None:
    found = summarize([record(REFERENCE, "c", 0, 1.0), record("ours", "c", 0, 1.0)], ROWS)["greedy"]
    assert found["ours"]["draft_share"] == pytest.approx(0.25)
    assert found[REFERENCE]["draft_share"] is None
