"""Tables of a document of kind "speeds"."""

from collections.abc import Mapping
from typing import Any

from hf_specdec.tools.bench.document import Document
from hf_specdec.tools.bench.rows import OWN_PLAIN, REFERENCE
from hf_specdec.tools.bench.speeds import NOT_EQUAL, Panel, flagged, mode_titles, panels
from hf_specdec.tools.bench.statistics import OVERALL
from hf_specdec.tools.bench.table import Table

DETAILS = {
    "": "{name}",
    "5th percentile": "{speed_fifth_percentile:.2f}",
    "least": "{speed_least:.2f} ({slowest_prompt})",
    "by CPU time": "{speed_by_processor_time[median]:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "first token": "{first_token_ms:.1f} ms",
    "draft share": "{draft_share:.1%}",
    "peak memory": "{peak_memory_mib:.0f} MiB",
}
Summary = Mapping[str, Any]


def speed_tables(document: Document) -> list[Table]:
    """Tables of each model and mode, and with several models one that compares them."""
    found = []
    for panel in panels(document):
        found.append(_speed_table(document, panel))
        bases = next((list(row["speed_against"]) for row in panel.rows.values()), [])
        if bases and len(panel.rows) > 1:
            found.append(_against_table(panel, bases))
        rows = [{"name": name, **row} for name, row in panel.rows.items()]
        tasks = [*_tasks(document, panel, "tokens_per_step"), OVERALL]
        steps = {task: f"{{tokens_per_step[{task}]:.2f}} ({{nodes_per_step[{task}]:.1f}})" for task in tasks}
        left_out = "by CPU time" if document["by_cpu_time"] else None
        found.append(Table.of("", {name: text for name, text in DETAILS.items() if name != left_out}, rows))
        found.append(Table.of("", {"tokens a step (drafted)": "{name}", **steps}, rows))
    return [*found, *(_models_tables(document) if len(document["models"]) > 1 else [])]


def _speed_table(document: Document, panel: Panel) -> Table:
    """Speed by task and overall with its interval, and equality."""
    tasks = [*_tasks(document, panel, "speed"), OVERALL]
    broken = {flag.row for flag in flagged(document) if (flag.model, flag.mode) == (panel.model, panel.mode)}
    cells = []
    for name, row in panel.rows.items():
        share = None if name == REFERENCE else row["share_equal"]
        equality = "-" if share is None else f"{share:.2f}" + (f" {NOT_EQUAL}" if name in broken else "")
        interval = None if name == REFERENCE else row["speed"].get(OVERALL)
        cells.append([name, *(_times(row["speed"].get(task)) for task in tasks), _interval(interval), equality])
    headers = ["", *tasks, "95 %", "equal"]
    shares = [row.get("share_equal_to_plain") for row in panel.rows.values()]
    if any(share is not None for share in shares):
        headers.append(f"equal to {OWN_PLAIN}")
        for cell, share in zip(cells, shares, strict=True):
            cell.append("-" if share is None or cell[0] == OWN_PLAIN else f"{share:.2f}")
    return Table(panel.title, headers, cells)


def _against_table(panel: Panel, bases: list[str]) -> Table:
    """Overall speed against transformers' own speculation and the rows that were asked for."""
    rows = {name: row["speed_against"] for name, row in panel.rows.items() if name != REFERENCE}
    cells = [
        [name, *(_full(None if base == name else speeds[base].get(OVERALL)) for base in bases)]
        for name, speeds in rows.items()
    ]
    return Table("", ["overall", *(f"over {base}" for base in bases)], cells)


def _models_tables(document: Document) -> list[Table]:
    """Overall speed of every row on every model, a table for each mode."""
    labels = [entry["name"] for entry in document["models"]]
    broken = {(flag.model, flag.mode, flag.row) for flag in flagged(document)}
    found = []
    for mode, title in mode_titles(document).items():
        columns = {panel.model: panel.rows for panel in panels(document) if panel.mode == mode}
        cells = []
        for name in dict.fromkeys(name for rows in columns.values() for name in rows):
            ratios = {label: rows[name]["speed"].get(OVERALL) for label, rows in columns.items() if name in rows}
            marks = {label: f" {NOT_EQUAL}" if (label, mode, name) in broken else "" for label in labels}
            cells.append([name, *(_times(ratios.get(label)) + marks[label] for label in labels)])
        found.append(Table(f"{OVERALL} by model: {title}", ["", *labels], cells))
    return found


def _tasks(document: Document, panel: Panel, field: str) -> list[str]:
    """Tasks that some row has a figure for, in the prompts' order."""
    tasks = dict.fromkeys(prompt["task"] for prompt in document["prompts"])
    return [task for task in tasks if any(task in row[field] for row in panel.rows.values())]


def _times(ratio: Summary | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def _interval(ratio: Summary | None) -> str:
    return "-" if ratio is None else f"{ratio['low']:.2f}-{ratio['high']:.2f}"


def _full(ratio: Summary | None) -> str:
    return "-" if ratio is None else f"{_times(ratio)} [{_interval(ratio)}]"
