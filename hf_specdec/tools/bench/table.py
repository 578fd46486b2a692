"""The table of speeds: records grouped by row and task. `bench`, `generate --compare` and the results pages print it.

    table = speed_table(records)
    print(table.to_string(float_format="{:.2f}".format, na_rep="-"))

Needs pandas. Knows nothing about models.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_specdec.errors import ConfigError, import_extra, unknown_name
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS

OVERALL = "overall"
NOTES = (
    "Speeds are tokens a second over those of {against} on the same prompt, by {clock}: the median of the rounds, then "
    "of the prompts. least: the slowest prompt. tokens/step: tokens of each forward after the prompt's. equal: share "
    "of prompts with the texts of {plain}."
)


def _frame(records: Iterable[Mapping[str, Any]]) -> Any:
    """A data frame of the records that have no error."""
    kept = [record for record in records if "error" not in record]
    if not any(record["round"] for record in kept):
        raise ConfigError("records", "must hold a timed round", len(kept), "Let the run go on.")
    return check_pandas().DataFrame(kept)


def check_pandas() -> Any:
    """Import pandas.

    Raises:
        MissingExtraError: it is not installed.
    """
    return import_extra("pandas", "bench", "a table of speeds")


def has_speeds(records: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether a table can be made: there are timed calls of transformers' `generate`."""
    return any(record["round"] and record["row"] == TRANSFORMERS for record in records)


def speed_table(records: Iterable[Mapping[str, Any]], *, by_cpu_time: bool = False, against: str = TRANSFORMERS) -> Any:
    """Group records into a table with a row for each way to generate.

    Args:
        records: of one measurement; those with an `error` are left out.
        by_cpu_time (`bool`, *optional*, defaults to `False`): whether speeds are of processor time, not of the clock.
        against (`str`, *optional*): the row that speeds are relative to.

    Returns:
        `pandas.DataFrame`: by row, speeds of each task, `overall` and of the `least` prompt, `tokens/s`, where calls
            were watched `tokens/step` and `first token ms`, and the share of texts that are `equal` to plain ones.

    Raises:
        MissingExtraError: pandas is not installed.
        ConfigError: there is no row `against`, or no timed round.
    """
    frame = _frame(records)
    clock = "cpu_seconds" if by_cpu_time else "seconds"
    timed, watched = frame[frame["round"] > 0], frame[frame["round"] == 0]
    speeds = speeds_by_prompt(records, by_cpu_time=by_cpu_time, against=against)
    tasks = [task for task in frame["task"].unique() if task in speeds.index.unique("task")]
    by_task = speeds.groupby("task").median().T.reindex(frame["row"].unique())
    table = by_task[tasks if len(tasks) > 1 else []].copy()
    table[OVERALL], table["least"] = speeds.median(), speeds.min()
    sums = timed.groupby("row")[["num_tokens", clock]].sum()
    table["tokens/s"] = sums["num_tokens"] / sums[clock]
    if {"num_steps", "first_token_seconds"} <= set(watched):
        steps = watched.groupby("row")[["num_steps", "num_step_tokens"]].sum()
        table["tokens/step"] = steps["num_step_tokens"] / steps["num_steps"]
        table["first token ms"] = 1000 * watched.groupby("row")["first_token_seconds"].median()
    texts = frame.pivot(index=["prompt", "round"], columns="row", values="digest")
    if PLAIN in texts:
        texts = texts[texts[PLAIN].notna()]
        is_equal = texts.eq(texts[PLAIN], axis=0) | texts.isna()
        table["equal"] = is_equal.groupby("prompt").all().mean()
    return table.rename_axis(index=None, columns=None)


def speeds_by_prompt(
    records: Iterable[Mapping[str, Any]], *, by_cpu_time: bool = False, against: str = TRANSFORMERS
) -> Any:
    """Speeds of each prompt, medians over its timed rounds.

    Returns:
        `pandas.DataFrame`: by task and prompt, a column for each row.
    """
    frame = _frame(records)
    frame["token_seconds"] = frame["cpu_seconds" if by_cpu_time else "seconds"] / frame["num_tokens"].clip(lower=1)
    timed = frame[frame["round"] > 0]
    times = timed.pivot(index=["task", "prompt", "round"], columns="row", values="token_seconds")
    if against not in times:
        raise unknown_name("against", against, list(times))
    return times.rdiv(times[against], axis=0).groupby(["task", "prompt"]).median()


def unequal_rows(table: Any, rows: Iterable[Any], *, dtype: str, do_sample: bool) -> list[str]:
    """Names of rows that broke their promise: full precision, and texts that are not those of plain decoding.

    In half precision the other of two nearly equal tokens may be chosen, so that the share is reported alone.

    Args:
        rows: the rows that were measured.
    """
    if dtype not in ("float32", "float64") or "equal" not in table:
        return []
    bound = [row.name for row in rows if row.name in table.index and (row.is_seed_exact or not do_sample)]
    return [name for name in bound if table["equal"][name] < 1.0]


def show(table: Any, width: int | None = None) -> str:
    """Write a table as text, in parts where it is wider than `width`."""
    return str(table.to_string(float_format="{:.2f}".format, na_rep="-", line_width=width))


def notes(records: Iterable[Mapping[str, Any]], *, by_cpu_time: bool = False, against: str = TRANSFORMERS) -> list[str]:
    """Lines below the table: meaning of its columns, why rows drafted nothing, and what was refused."""
    reasons: dict[str, None] = {}
    for record in records:
        if "error" in record:
            reasons[f"{record['row']} refuses {record['task']}: {record['error']}"] = None
        elif "plain_reason" in record:
            reasons[f"{record['row']} decoded without drafts: {record['plain_reason']}"] = None
    clock = "processor time" if by_cpu_time else "the clock"
    return [NOTES.format(against=repr(against), plain=repr(PLAIN), clock=clock), *reasons]
