"""The tables of a document as rows of text, and as markdown. Knows nothing about terminals.

headings, rows = speed_table(document, "greedy")
print(markdown(document))
"""

from collections.abc import Sequence
from typing import Any

from hf_specdec.bench.document import flagged
from hf_specdec.bench.rows import REFERENCE
from hf_specdec.bench.statistics import OVERALL

__all__ = ["NOT_EQUAL", "detail_table", "facts", "markdown", "markdown_table", "notes", "speed_table", "titles"]

NOT_EQUAL = "NOT EQUAL"
MODE_TITLES = {"greedy": "greedy", "sampled": "sampled, temperature {temperature}, seed {seed}"}

Table = tuple[list[str], list[list[str]]]


def speed_table(document: dict[str, Any], mode: str) -> Table:
    """Headings and cells of one mode: speed by task and overall with its interval, and equality."""
    rows = document["summary"][mode]
    tasks = list(dict.fromkeys(prompt["task"] for prompt in document["prompts"]))
    tasks = [task for task in tasks if any(task in row["speed"] for row in rows.values())]
    broken = {name for broken_mode, name, _ in flagged(document) if broken_mode == mode}
    cells = []
    for name, row in rows.items():
        speeds = [_times(row["speed"].get(task)) for task in (*tasks, OVERALL)]
        interval = "-" if name == REFERENCE else _interval(row["speed"].get(OVERALL))
        cells.append([name, *speeds, interval, _equality(row, name, name in broken)])
    return ["", *tasks, OVERALL, "95 %", "equal"], cells


def detail_table(document: dict[str, Any], mode: str) -> Table:
    """Headings and cells of one mode: what lies behind the speeds."""
    headings = ["", "tokens a step", "drafted a step", "tokens/s", "first token", "draft share", "peak memory"]
    return headings, [[name, *_details(row)] for name, row in document["summary"][mode].items()]


def titles(document: dict[str, Any]) -> dict[str, str]:
    """A title for each mode."""
    return {mode: MODE_TITLES[mode].format(**document["settings"]) for mode in document["summary"]}


def facts(document: dict[str, Any]) -> list[str]:
    """The lines above the tables: hardware, model, versions, settings."""
    header, settings = document["header"], document["settings"]
    hardware = header["hardware"]
    model = header["model"]
    where = [hardware[name] for name in ("accelerator", "cpu") if name in hardware]
    lines = [
        f"{', '.join(where)}, {hardware['cores']} cores; {header['dtype']}, {header['device']}, "
        f"{header['threads']} thread{'s' if header['threads'] != 1 else ''}",
        f"{model['name']} ({model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters); "
        f"{len(document['prompts'])} prompts, {settings['max_new_tokens']} new tokens, {settings['rounds']} rounds",
        ", ".join(f"{name} {version}" for name, version in header["versions"].items())
        + f"; commit {header['commit'] or 'unknown'}; {header['date']}",
    ]
    if "widening" in model:
        size = model["widening"]
        difference = size["largest_logit_difference"]
        lines.append(
            f"widened to {size['hidden_size']}x{size['num_layers']}; largest difference of the logits {difference:.1e}"
        )
    return lines


def notes(document: dict[str, Any]) -> list[str]:
    """The lines below the tables: what the columns say, what is missing, what is wrong."""
    lines = [
        f"Tasks and overall: tokens a second over those of {REFERENCE!r} beside it, median over prompts; 95 %: bootstrap "
        f"interval of overall. Equal: share of prompts with the tokens of {REFERENCE!r}.",
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


def markdown(document: dict[str, Any]) -> str:
    """The whole document as markdown."""
    parts = [*(f"{line}  " for line in facts(document)), ""]
    for mode, title in titles(document).items():
        parts += [f"**{title}**", "", markdown_table(*speed_table(document, mode)), ""]
        parts += [markdown_table(*detail_table(document, mode)), ""]
    parts += [f"- {line}" for line in notes(document)]
    return "\n".join(parts) + "\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, the first column left-aligned and the others right-aligned."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _details(row: dict[str, Any]) -> list[str]:
    speed, first, share, memory = (
        row[name] for name in ("tokens_per_second", "first_token_seconds", "draft_share", "peak_memory_bytes")
    )
    return [
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
    return "-" if ratio is None else f"{ratio['low']:.2f} to {ratio['high']:.2f}"


def _equality(row: dict[str, Any], name: str, is_broken: bool) -> str:
    if name == REFERENCE or row["share_equal"] is None:
        return "-"
    return f"{row['share_equal']:.2f}" + (f" {NOT_EQUAL}" if is_broken else "")
