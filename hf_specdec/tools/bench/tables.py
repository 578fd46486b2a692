"""The tables of a document as rows of text, and as markdown. Knows nothing about terminals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.tools.bench.captions import NOT_EQUAL, Panel, facts, has_several, mode_titles, notes, panels
from hf_specdec.tools.bench.document import COST, DRAFTING, GPU, MANY, PRECISIONS, REPLAY, SPEEDS, STEPS, flagged
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.statistics import OVERALL

Document = dict[str, Any]
AUTO_COLUMNS = {
    "nodes": "{num_nodes}",
    "draft": "{draft_ms:.2f} ms",
    "observe": "{observe_ms:.2f} ms",
    "read logits": "{reduce_ms:.2f} ms",
    "tokens a step": "{tokens_per_step:.3f}",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(document: Document) -> list[Table]:
    """The tables of a document of any kind."""
    return _TABLES[document["kind"]](document)


def _speeds_tables(document: Document) -> list[Table]:
    """For each model and mode, and with several models one that sets them side by side."""
    found = []
    for panel in panels(document):
        found += [_speed_table(document, panel), *_against_table(panel), _detail_table(panel)]
        found += [_steps_table(document, panel), *_task_tables(document, panel), *_reliability_tables(panel)]
    return [*found, *(_models_tables(document) if has_several(document) else [])]


def markdown(document: Document) -> str:
    """The whole document as markdown."""
    parts = [*(f"{line}  " for line in facts(document)), ""]
    for table in tables(document):
        parts += [f"**{table.title}**", ""] if table.title else []
        parts += [_markdown_table(table), ""]
    parts += [f"- {line}" for line in notes(document)]
    return "\n".join(parts) + "\n"


def _speed_table(document: Document, panel: Panel) -> Table:
    """Speed by task and overall with its interval, and equality."""
    tasks = _tasks(document, panel, "speed")
    broken = {flag.row for flag in flagged(document) if (flag.model, flag.mode) == (panel.model, panel.mode)}
    cells = []
    for name, row in panel.rows.items():
        speeds = [_times(row["speed"].get(task)) for task in (*tasks, OVERALL)]
        interval = "-" if name == REFERENCE else _interval(row["speed"].get(OVERALL))
        cells.append([name, *speeds, interval, _equality(row, name, name in broken)])
    return Table(panel.title, ["", *tasks, OVERALL, "95 %", "equal"], cells)


def _against_table(panel: Panel) -> list[Table]:
    """Overall speed against transformers' own speculation, where that was measured."""
    rows = {name: row for name, row in panel.rows.items() if name != REFERENCE}
    bases = list(next(iter(rows.values()))["speed_against"]) if rows else []
    cells = []
    for name, row in rows.items():
        ratios = [None if base == name else row["speed_against"][base].get(OVERALL) for base in bases]
        cells.append([name, *map(_times_with_interval, ratios)])
    return [Table("", ["overall", *(f"over {base}" for base in bases)], cells)] if bases else []


def _detail_table(panel: Panel) -> Table:
    """What lies behind the speeds."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "by CPU time": lambda row: _times(row["speed_by_processor_time"]),
        "tokens a step": lambda row: f"{row['mean_acceptance_length']:.2f}",
        "drafted a step": lambda row: f"{row['drafted_per_step']:.1f}",
        "tokens/s": lambda row: _known(row["tokens_per_second"], "{:.1f}"),
        "first token": lambda row: _known(row["first_token_seconds"], "{:.1f} ms", 1000),
        "draft share": lambda row: _known(row["draft_share"], "{:.1%}"),
        "peak memory": lambda row: _known(row["peak_memory_bytes"], "{:.0f} MiB", 1 / 2**20),
    }
    cells = [[name, *(text(row) for text in columns.values())] for name, row in panel.rows.items()]
    return Table("", ["", *columns], cells)


def _steps_table(document: Document, panel: Panel) -> Table:
    """Tokens a verify step by task, and what it computed for them."""
    columns = [*_tasks(document, panel, "tokens_per_step"), OVERALL]
    cells = []
    for name, row in panel.rows.items():
        pairs = [(row["tokens_per_step"].get(task), row["nodes_per_step"].get(task)) for task in columns]
        cells.append([name, *("-" if tokens is None else f"{tokens:.2f} ({nodes:.1f})" for tokens, nodes in pairs)])
    return Table("", ["tokens a step (drafted)", *columns], cells)


def _task_tables(document: Document, panel: Panel) -> list[Table]:
    """Speed over each row that was asked for, by task with intervals."""
    columns = [*_tasks(document, panel, "speed"), OVERALL]
    found = []
    for base in document.get("against", ()):
        cells = []
        for name, row in panel.rows.items():
            ratios = row["speed_against"].get(base, {})
            measured = [None if name == base else ratios.get(task) for task in columns]
            cells.append([name, *map(_times_with_interval, measured)])
        found.append(Table("", [f"speed over {base}", *columns], cells))
    return found


def _reliability_tables(panel: Panel) -> list[Table]:
    """For rows that predict what will be accepted: the predictions beside what came of them."""
    found = []
    for name, row in panel.rows.items():
        bins = row["reliability"]
        if bins:
            cells = [
                ["mean prediction", *(f"{point['predicted']:.3f}" for point in bins)],
                ["share accepted", *(f"{point['accepted']:.3f}" for point in bins)],
                ["drafted tokens", *(f"{point['count']:.0f}" for point in bins)],
            ]
            headings = [f"{point['from']:.1f}-{point['to']:.1f}" for point in bins]
            found.append(Table("", [f"{name} predicts", *headings], cells))
    return found


def _tasks(document: Document, panel: Panel, field: str) -> list[str]:
    """The tasks that some row has a figure for, in the prompts' order."""
    tasks = dict.fromkeys(prompt["task"] for prompt in document["prompts"])
    return [task for task in tasks if any(task in row[field] for row in panel.rows.values())]


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


def _cost_tables(document: Document) -> list[Table]:
    """Each model's curves, a row for each context length."""
    return [_cost_table(entry, has_several(document)) for entry in document["models"]]


def _cost_table(entry: Mapping[str, Any], with_label: bool) -> Table:
    counts = [point["num_tokens"] for point in entry["curves"][0]["points"]]
    rows = []
    for curve in entry["curves"]:
        points = curve["points"]
        cells = [_times_with_interval(point["ratio"]) for point in points[1:]]
        rows.append([f"context of {curve['context_length']}", f"{points[0]['seconds'] * 1000:.2f} ms", *cells])
    title = f"{entry['name']}: t(T) / t(1)" if with_label else "t(T) / t(1)"
    return Table(title, ["", "t(1)", *(f"T = {count}" for count in counts[1:])], rows)


def _replay_tables(document: Document) -> list[Table]:
    """Tokens a step over the number of drafted tokens."""
    counts = sorted({point["num_nodes"] for points in document["drafters"].values() for point in points})
    rows = []
    for name, points in document["drafters"].items():
        known = {point["num_nodes"]: f"{point['tokens_per_step']:.2f}" for point in points}
        rows.append([name, *(known.get(count, "-") for count in counts)])
    return [Table("tokens a step", ["drafted tokens at most", *map(str, counts)], rows)]


def _many_tables(document: Document) -> list[Table]:
    columns = {
        "generate_many": "{row}",
        "rows": "{batch_size}",
        "over plain batches": "{ratio:.2f}",
        "seconds": "{seconds:.1f}",
        "equal": "{num_equal} of {num_prompts}",
        "failed": "{num_failed}",
    }
    return [_listed("", columns, document["rows"])]


def _precisions_tables(document: Document) -> list[Table]:
    loaded = [row for row in document["rows"] if "error" not in row]
    columns = {
        "": "{precision}",
        "MB": "{megabytes:.1f}",
        "over bf16": "{weights_over_bf16:.2f}",
        "a step": "{milliseconds:.1f} ms",
        "over bf16's": "{over_bf16_1:.2f}",
        "of 8 tokens": "{over_bf16_8:.2f}",
        "by CPU time": "{by_cpu_time_1:.2f}",
        "of 8 tokens, by CPU time": "{by_cpu_time_8:.2f}",
        "logits": "{max_abs_logit:.2f}",
        "KL": "{mean_kl:.5f}",
    }
    rows = [{**row, "megabytes": row["weights_bytes"] / 1e6, "milliseconds": 1e3 * row["seconds_1"]} for row in loaded]
    found = _listed(loaded[0]["model"]["name"], columns, rows)
    for place, tokens in enumerate(loaded[0]["tokens"]):
        found.headings.append(f"equal, {tokens['method']}")
        for cells, row in zip(found.rows, loaded, strict=True):
            cells.append("{num_equal} of {num_prompts}".format(**row["tokens"][place]))
    return [found]


def _drafting_tables(document: Document) -> list[Table]:
    lengths = [
        {**point, **{name: 1e6 * point[name] for name in ("seconds", "transformers_seconds")}}
        for point in document["prompt_lookup"]
    ]
    context = {
        "context": "{context_length}",
        "a step": "{seconds:.1f} us",
        "transformers": "{transformers_seconds:.1f} us",
    }
    return _filled(_listed("prompt_lookup", context, lengths), _listed("auto", AUTO_COLUMNS, document["auto"]))


def _step_costs_tables(document: Document) -> list[Table]:
    steps = {
        "a step of": "{name}",
        "outside the forward": "{outside:.1f}",
        "views": "{views:.1f}",
        "inside": "{inside:.0f}",
        "in drafts": "{drafts:.0f}",
        "reads": "{reads:.1f}",
        "tokens": "{tokens_per_step:.2f}",
        "time": "{step_ms:.2f} ms",
    }
    if None not in (row[name] for row in document["steps"] for name in ("launches", "graph_launches")):
        steps |= {"launches": "{launches:.0f}", "graphs": "{graph_launches:.1f}"}
    return _filled(_listed("operations", steps, document["steps"]), _listed("auto", AUTO_COLUMNS, document["auto"]))


def _gpu_tables(document: Document) -> list[Table]:
    found = []
    for entry in document["shapes"]:
        columns = {
            "row": "{name}",
            "batch": "{batch}",
            "context": "{context}",
            "tokens/s": "{tokens_per_second:.1f}",
            "over plain": "{over_plain:.2f}",
            "over theirs": "{over_theirs:.2f}",
            "tokens a step": "{length}",
            "a later token": "{later}",
            "first call": "{first_call_seconds:.1f} s",
            "graphs": "{graphs}",
            "equal": "{same}",
        }
        rows = [
            {
                **row,
                "over_theirs": row["tokens_per_second"] / _best_of_theirs(entry["rows"], row),
                "length": "-" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}",
                "later": f"{1000 * row['later_token_seconds']:.2f} ms" if "later_token_seconds" in row else "-",
                "graphs": "-" if row["num_graphs"] is None else row["num_graphs"],
                "same": "yes" if row["equal"] else "no",
            }
            for row in entry["rows"]
        ]
        found.append(_listed(entry["shape"], columns, rows))
        if left_out := entry.get("left_out"):
            columns = {"left out": "{name}", "batch": "{batch}", "context": "{context}", "reason": "{reason}"}
            cells = [{name: "-" if value is None else value for name, value in row.items()} for row in left_out]
            found.append(_listed(f"{entry['shape']}, left out", columns, cells))
        found += [_profile_table(entry["shape"], row) for row in entry["rows"] if "profile" in row]
        found += _step_costs_tables(entry["steps"]) if "steps" in entry else []
    return found


def _profile_table(shape: str, row: Mapping[str, Any]) -> Table:
    """Where the device's time of one call goes."""
    call, columns = row["profile"], {"kernel": "{name}", "runs": "{count}", "ms": "{ms:.2f}", "share": "{share:.0%}"}
    busy = call["device_seconds"]
    kernels = [{**one, "ms": 1000 * one["seconds"], "share": one["seconds"] / busy} for one in call["kernels"]]
    title = f"{shape}, {row['name']}, {row['batch']} x {row['context']}: the device works {busy / call['seconds']:.0%}"
    return _listed(title, columns, kernels)


def _best_of_theirs(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float:
    """Tokens a second of transformers' fastest way to do what a row does."""

    def kind(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return one["batch"], one["context"], one["name"].endswith("sampled")

    theirs = [one for one in rows if kind(one) == kind(row) and one["name"].startswith(("plain", "transformers"))]
    return max(float(one["tokens_per_second"]) for one in theirs)


def _listed(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Table:
    """A line for each row, its cells the columns' formats filled in."""
    return Table(title, list(columns), [[text.format(**row) for text in columns.values()] for row in rows])


def _filled(*tables: Table) -> list[Table]:
    """Those that have rows; an interrupt leaves some without."""
    return [table for table in tables if table.rows]


def _markdown_table(table: Table) -> str:
    """The first column left-aligned and the others right-aligned."""
    lines = [table.headings, ["---", *["---:"] * (len(table.headings) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _known(value: float | None, text: str, factor: float = 1) -> str:
    return "-" if value is None else text.format(value * factor)


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def _times_with_interval(ratio: dict[str, Any] | None) -> str:
    return f"{_times(ratio)} [{_interval(ratio)}]" if ratio else "-"


def _interval(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['low']:.2f}-{ratio['high']:.2f}"


def _equality(row: dict[str, Any], name: str, is_broken: bool) -> str:
    if name == REFERENCE or row["share_equal"] is None:
        return "-"
    return f"{row['share_equal']:.2f}" + (f" {NOT_EQUAL}" if is_broken else "")


_TABLES: dict[str, Callable[[Document], list[Table]]] = {
    SPEEDS: _speeds_tables,
    COST: _cost_tables,
    REPLAY: _replay_tables,
    MANY: _many_tables,
    PRECISIONS: _precisions_tables,
    DRAFTING: _drafting_tables,
    STEPS: _step_costs_tables,
    GPU: _gpu_tables,
}
