"""The tables of a document as rows of text, and as markdown. Knows nothing about terminals.

for table in tables(document):
    print(table.title, table.headings, table.rows)
print(markdown(document))
"""

from dataclasses import dataclass
from typing import Any

from hf_specdec.bench.document import COST, SPEEDS, flagged
from hf_specdec.bench.rows import REFERENCE
from hf_specdec.bench.statistics import OVERALL

__all__ = ["NOT_EQUAL", "Table", "facts", "markdown", "notes", "tables", "titles"]

NOT_EQUAL = "NOT EQUAL"
MODE_TITLES = {"greedy": "greedy", "sampled": "sampled, temperature {temperature}, seed {seed}"}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(document: Document) -> list[Table]:
    """The tables of a document of any kind."""
    if document["kind"] == COST:
        return [_cost_table(document)]
    if document["kind"] == SPEEDS:
        return [
            table
            for mode, title in titles(document).items()
            for table in (
                _speed_table(document, mode, title),
                *_against_table(document, mode),
                _detail_table(document, mode),
            )
        ]
    return [_replay_table(document)]


def titles(document: Document) -> dict[str, str]:
    """A title for each mode of a document of speeds."""
    return {mode: MODE_TITLES[mode].format(**document["settings"]) for mode in document["summary"]}


def facts(document: Document) -> list[str]:
    """The lines above the tables: hardware, model, versions, settings."""
    header = document["header"]
    hardware = header["hardware"]
    where = [hardware[name] for name in ("accelerator", "cpu") if name in hardware]
    many = "s" if header["threads"] != 1 else ""
    machine = f"{', '.join(where)}, {hardware['cores']} cores; {header['device']}, {header['threads']} thread{many}"
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    lines = [f"{machine}, {header['dtype']}" if "dtype" in header else machine]
    lines += _model_facts(header["model"]) if "model" in header else []
    if document["kind"] == SPEEDS:
        settings = document["settings"]
        counts = f"{len(document['prompts'])} prompts, at most {settings['max_new_tokens']} new tokens"
        lines.append(f"{counts}, rounds: {settings['rounds']}")
    elif "num_records" in document.get("settings", {}):
        lines.append(f"{document['settings']['num_records']} recorded answers")
    return [*lines, f"{versions}; commit {header['commit'] or 'unknown'}; {header['date']}"]


def notes(document: Document) -> list[str]:
    """The lines below the tables: what the columns say, what is missing, what is wrong."""
    if document["kind"] == COST:
        return ["Median of the ratios to one token in the same round; in brackets the 95 % bootstrap interval."]
    if document["kind"] != SPEEDS:
        return ["Tokens a step: 1 + accepted drafts, on recorded answers."]
    lines = [
        f"Tasks and overall: tokens a second over those of {REFERENCE!r} beside it, median over prompts; 95 %: "
        f"bootstrap interval of overall. Equal: share of prompts with the tokens of {REFERENCE!r}.",
        "By CPU time: the same as overall, from the processor time of the process; the two agree on a quiet machine. "
        "Tokens a step: mean acceptance length, from the target's forwards after the prompt's. First token: median. "
        f"Peak memory: {document['header']['peak_memory']}.",
    ]
    lines += [f"Left out: {name}: {reason}" for name, reason in document["left_out"].items()]
    for mode, rows in document["summary"].items():
        for name, row in rows.items():
            lines += [f"{name} ({mode}) decoded without drafts: {reason}" for reason in row["plain_reasons"]]
    lines += [
        f"{NOT_EQUAL}: {name} ({mode}) gave the tokens of {REFERENCE!r} on {share:.0%} of the prompts only."
        for mode, name, share in flagged(document)
    ]
    if not document["is_complete"]:
        lines.append("Incomplete: the run was interrupted; --resume continues it.")
    return lines


def markdown(document: Document) -> str:
    """The whole document as markdown."""
    parts = [*(f"{line}  " for line in facts(document)), ""]
    for table in tables(document):
        parts += [f"**{table.title}**", ""] if table.title else []
        parts += [_markdown_table(table), ""]
    parts += [f"- {line}" for line in notes(document)]
    return "\n".join(parts) + "\n"


def _speed_table(document: Document, mode: str, title: str) -> Table:
    """Speed by task and overall with its interval, and equality."""
    rows = document["summary"][mode]
    tasks = list(dict.fromkeys(prompt["task"] for prompt in document["prompts"]))
    tasks = [task for task in tasks if any(task in row["speed"] for row in rows.values())]
    broken = {name for broken_mode, name, _ in flagged(document) if broken_mode == mode}
    cells = []
    for name, row in rows.items():
        speeds = [_times(row["speed"].get(task)) for task in (*tasks, OVERALL)]
        interval = "-" if name == REFERENCE else _interval(row["speed"].get(OVERALL))
        cells.append([name, *speeds, interval, _equality(row, name, name in broken)])
    return Table(title, ["", *tasks, OVERALL, "95 %", "equal"], cells)


def _against_table(document: Document, mode: str) -> list[Table]:
    """Overall speed against transformers' own speculation, where that was measured."""
    rows = {name: row for name, row in document["summary"][mode].items() if name != REFERENCE}
    bases = list(next(iter(rows.values()))["speed_against"]) if rows else []
    cells = []
    for name, row in rows.items():
        ratios = [None if base == name else row["speed_against"][base] for base in bases]
        cells.append([name, *(f"{_times(ratio)} [{_interval(ratio)}]" if ratio else "-" for ratio in ratios)])
    return [Table("", ["overall", *(f"over {base}" for base in bases)], cells)] if bases else []


def _detail_table(document: Document, mode: str) -> Table:
    """What lies behind the speeds."""
    headings = ["", "by CPU time", "tokens a step", "drafted a step", "tokens/s", "first token", "draft share"]
    headings.append("peak memory")
    return Table("", headings, [[name, *_details(row)] for name, row in document["summary"][mode].items()])


def _cost_table(document: Document) -> Table:
    counts = [point["num_tokens"] for point in document["curves"][0]["points"]]
    rows = []
    for curve in document["curves"]:
        points = curve["points"]
        cells = [f"{point['ratio']['median']:.2f} [{_interval(point['ratio'])}]" for point in points[1:]]
        rows.append([f"context of {curve['context_length']}", f"{points[0]['seconds'] * 1000:.2f} ms", *cells])
    return Table("t(T) / t(1)", ["", "t(1)", *(f"T = {count}" for count in counts[1:])], rows)


def _replay_table(document: Document) -> Table:
    counts = sorted({point["num_nodes"] for points in document["drafters"].values() for point in points})
    rows = []
    for name, points in document["drafters"].items():
        known = {point["num_nodes"]: f"{point['tokens_per_step']:.2f}" for point in points}
        rows.append([name, *(known.get(count, "-") for count in counts)])
    return Table("tokens a step", ["drafted tokens at most", *map(str, counts)], rows)


def _markdown_table(table: Table) -> str:
    """The first column left-aligned and the others right-aligned."""
    lines = [table.headings, ["---", *["---:"] * (len(table.headings) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _model_facts(model: dict[str, Any]) -> list[str]:
    lines = [f"{model['name']} ({model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters)"]
    if "widening" in model:
        size = model["widening"]
        difference = f"largest difference of the logits {size['largest_logit_difference']:.1e}"
        lines.append(f"widened to {size['hidden_size']}x{size['num_layers']}; {difference}")
    return lines


def _details(row: dict[str, Any]) -> list[str]:
    speed, first, share, memory = (
        row[name] for name in ("tokens_per_second", "first_token_seconds", "draft_share", "peak_memory_bytes")
    )
    return [
        _times(row["speed_by_processor_time"]),
        f"{row['mean_acceptance_length']:.2f}",
        f"{row['drafted_per_step']:.1f}",
        "-" if speed is None else f"{speed:.1f}",
        "-" if first is None else f"{first * 1000:.1f} ms",
        "-" if share is None else f"{share:.1%}",
        "-" if memory is None else f"{memory / 2**20:.0f} MiB",
    ]


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def _interval(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['low']:.2f}-{ratio['high']:.2f}"


def _equality(row: dict[str, Any], name: str, is_broken: bool) -> str:
    if name == REFERENCE or row["share_equal"] is None:
        return "-"
    return f"{row['share_equal']:.2f}" + (f" {NOT_EQUAL}" if is_broken else "")
