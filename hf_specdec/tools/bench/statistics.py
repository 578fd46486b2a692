"""From single calls to medians with their spread. Knows nothing about models or output.

A prompt's ratio is the median over its rounds of (seconds a token of the reference) / (seconds a token of the row), the
two calls having run one after the other; a row's ratio is the median over prompts. The interval is a percentile
bootstrap over prompts.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_specdec.tools.bench.plan import WATCHED_ROUND
from hf_specdec.tools.bench.rows import REFERENCE

RESAMPLES = 2000
CONFIDENCE = 0.95
OVERALL = "overall"

Record = Mapping[str, Any]


def median_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Median of `values` and the interval that 95 % of the medians of resampled values fall in."""
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = torch.quantile(data[picks], 0.5, dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(medians, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return {"median": float(torch.quantile(data, 0.5)), "low": low, "high": high, "count": len(values)}


def mean_acceptance_length(watched: Sequence[Record]) -> float:
    """Tokens a verify step: what the target's forwards after the prompt's led to, over their number.

    Of batches and of other libraries, whose tokens no one watches, the calls' own means, weighted by their forwards.
    """
    steps = _after_the_prompt(watched, "blocks")
    counted = [record for record in watched if "mean_acceptance_length" in record]
    weights = [max(len(record.get("drafted", ())) - 1, 1) for record in counted]
    sums = sum(weight * record["mean_acceptance_length"] for weight, record in zip(weights, counted, strict=True))
    return _mean(steps, sums / sum(weights) if weights else 1.0)


def summarize(
    records: Sequence[Record], rows: Iterable[Record], against: Iterable[str] = (), clock: str = "seconds"
) -> dict[str, Any]:
    """Modes, and in each mode the rows by name, with everything the tables and plots show.

    Args:
        records: of calls, watched and timed.
        against: rows that all are compared with, next to the reference and transformers' own.
        clock: `"seconds"` or `"cpu_seconds"`, which speeds are of.
    """
    described = list(rows)
    named = set(against)
    bases = [row["name"] for row in described if row.get("kind") == "transformers" or row["name"] in named]
    summary = {}
    for mode in dict.fromkeys(record["mode"] for record in records):
        own = [record for record in records if record["mode"] == mode]
        timed = [record for record in own if record["round"] != WATCHED_ROUND]
        watched = [record for record in own if record["round"] == WATCHED_ROUND]
        summary[mode] = {row["name"]: _row_summary(row["name"], timed, watched, bases, clock) for row in described}
    return summary


def _row_summary(
    name: str, timed: Sequence[Record], watched: Sequence[Record], bases: Sequence[str], clock: str
) -> dict[str, Any]:
    asked = [record for record in (*timed, *watched) if record["row"] == name]
    own = [record for record in timed if record["row"] == name and "error" not in record]
    own_watched = [record for record in watched if record["row"] == name and "error" not in record]
    drafting = [record for record in own if record.get("draft_seconds") is not None]
    seconds, num_tokens = _sum(own, clock), _sum(own, "num_tokens")
    ratios = _by_prompt(own, timed, clock)
    slowest = min(ratios, key=ratios.__getitem__, default=None)
    return {
        "speed": _ratios(own, timed, clock),
        "speed_by_prompt": list(ratios.values()),
        "speed_fifth_percentile": _quantile(list(ratios.values()), 0.05),
        "speed_least": None if slowest is None else ratios[slowest],
        "slowest_prompt": None if slowest is None else slowest[1],
        "speed_by_processor_time": _ratios(own, timed, "cpu_seconds").get(OVERALL),
        "speed_against": {base: _ratios(own, timed, clock, base) for base in bases},
        "tokens_per_second": num_tokens / seconds if seconds else None,
        "num_tokens": num_tokens,
        "first_token_ms": _median([1000 * seconds for seconds in _known(own_watched, "first_token_seconds")]),
        "tokens_per_step": _by_task(own_watched, mean_acceptance_length),
        "nodes_per_step": _by_task(own_watched, _drafted_per_step),
        "draft_share": _sum(drafting, "draft_seconds") / _sum(drafting, "seconds") if drafting else None,
        "peak_memory_mib": max((size / 2**20 for size in _known(own_watched, "peak_memory_bytes")), default=None),
        "share_equal": _share_equal([*own, *own_watched], "equal"),
        "share_equal_to_plain": _share_equal([*own, *own_watched], "equal_to_plain"),
        "plain_reasons": sorted(set(filter(None, _known(own, "plain_reason")))),
        "errors": _tasks_by_error(asked),
    }


def _tasks_by_error(asked: Iterable[Record]) -> dict[str, list[str]]:
    """Tasks of the calls that gave no tokens, by the reason."""
    tasks: dict[str, dict[str, None]] = {}
    for record in asked:
        if "error" in record:
            tasks.setdefault(record["error"], {})[record["task"]] = None
    return {error: list(names) for error, names in tasks.items()}


def _drafted_per_step(watched: Sequence[Record]) -> float:
    """Tokens that a verify step computed besides the current one, the prompt's forward left out."""
    return _mean(_after_the_prompt(watched, "drafted"), 0.0)


def _by_task(watched: Sequence[Record], mean: Callable[[Sequence[Record]], float]) -> dict[str, float]:
    """A mean over the steps of each task, and of all."""
    tasks = dict.fromkeys(record["task"] for record in watched)
    found = {task: mean([record for record in watched if record["task"] == task]) for task in tasks}
    return {**found, OVERALL: mean(watched)} if found else {}


def _after_the_prompt(watched: Iterable[Record], field: str) -> list[int]:
    """Counts of the target's forwards after the prompt's."""
    return [count for record in watched for count in record.get(field, ())[1:]]


def _known(records: Iterable[Record], field: str) -> list[Any]:
    return [record[field] for record in records if record.get(field) is not None]


def _sum(records: Iterable[Record], field: str) -> Any:
    return sum(record[field] for record in records)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _ratios(own: Sequence[Record], records: Sequence[Record], clock: str, base: str = REFERENCE) -> dict[str, Any]:
    """Speed against the row `base` for each task and overall, with intervals."""
    groups: dict[str, list[float]] = {}
    for (task, _, _), ratio in _by_prompt(own, records, clock, base).items():
        groups.setdefault(task, []).append(ratio)
    if groups:
        groups[OVERALL] = [ratio for ratios in groups.values() for ratio in ratios]
    return {task: median_with_interval(ratios) for task, ratios in groups.items()}


def _by_prompt(
    own: Sequence[Record], records: Sequence[Record], clock: str, base: str = REFERENCE
) -> dict[tuple[str, str, int], float]:
    """Ratio to the row `base`, the median over rounds, by task, prompt and turn."""
    references = {_visit(record): record for record in records if record["row"] == base}
    rounds: dict[tuple[str, str, int], list[float]] = {}
    for record in own:
        other = references[_visit(record)]
        if min(record[clock], other[clock], record["num_tokens"], other["num_tokens"]) > 0:
            ratio = (other[clock] / other["num_tokens"]) / (record[clock] / record["num_tokens"])
            rounds.setdefault((record["task"], record["prompt"], record["turn"]), []).append(ratio)
    return {prompt: statistics.median(ratios) for prompt, ratios in rounds.items()}


def _share_equal(seen: Sequence[Record], field: str) -> float | None:
    """Share of prompts on which every call gave the tokens of another row; `None` where that was not measured."""
    prompts: dict[tuple[str, int], bool] = {}
    for record in seen:
        if (equal := record.get(field)) is not None:
            key = (record["prompt"], record["turn"])
            prompts[key] = prompts.get(key, True) and equal
    return sum(prompts.values()) / len(prompts) if prompts else None


def _median(values: Sequence[float]) -> float | None:
    return _quantile(values, 0.5)


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), share)) if values else None


def _visit(record: Record) -> tuple[str, str, int, int]:
    return record["mode"], record["prompt"], record["turn"], record["round"]
