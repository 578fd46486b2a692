"""Documents of kind "speeds": panels, rows that broke their promise, notes, and which run continues one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_specdec.errors import ConfigError, shown, unknown_name
from hf_specdec.tools.bench.document import SPEEDS, Document
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.statistics import summarize

EXACT_DTYPES = ("float32", "float64")
NOT_EQUAL = "NOT EQUAL"
MODE_TITLES = {"greedy": "greedy", "sampled": "sampled, temperature {temperature}, seed {seed}"}
SAME_HEADER = ("hardware", "versions", "device", "threads")
SAME_MODEL = ("dtype", "model", "assistant")


class Flag(NamedTuple):
    """A row that broke its promise.

    Attributes:
        model (`str`): the model's label.
        mode (`str`): `"greedy"` or `"sampled"`.
        row (`str`): the row's name.
        share_equal (`float`): share of prompts on which it gave the tokens that it promises.
    """

    model: str
    mode: str
    row: str
    share_equal: float


class Panel(NamedTuple):
    """One model in one mode: a table, or a part of a figure."""

    title: str
    model: str
    mode: str
    rows: dict[str, Any]


def flagged(document: Document) -> list[Flag]:
    """Rows that broke their promise: full precision, and tokens that are not plain's.

    In half precision a near-tie may fall either way, so the share is reported and nothing flagged. A sampled row is
    held to its promise only if it makes one: transformers' assisted loop draws in another order than plain sampling.
    """
    return [flag for entry in document["models"] if entry["dtype"] in EXACT_DTYPES for flag in _flags(entry)]


def _flags(entry: Mapping[str, Any]) -> list[Flag]:
    promises = {row["name"]: row["is_seed_exact"] for row in entry["rows"]}
    return [
        Flag(entry["name"], mode, name, summary["share_equal"])
        for mode, rows in entry["summary"].items()
        for name, summary in rows.items()
        if summary["share_equal"] not in (None, 1.0) and (mode == "greedy" or promises[name])
    ]


def mode_titles(document: Document) -> dict[str, str]:
    """A title for each mode."""
    modes = dict.fromkeys(mode for entry in document["models"] for mode in entry["summary"])
    clock = ", by processor time" if document["by_cpu_time"] else ""
    return {mode: MODE_TITLES[mode].format(**document["settings"]) + clock for mode in modes}


def panels(document: Document) -> list[Panel]:
    """Models of a document of speeds, each in its modes."""
    modes, several = mode_titles(document), len(document["models"]) > 1
    return [
        Panel(f"{entry['name']}: {modes[mode]}" if several else modes[mode], entry["name"], mode, rows)
        for entry in document["models"]
        for mode, rows in entry["summary"].items()
    ]


def summarize_again(document: Document, against: Sequence[str] | None = None, by_cpu_time: bool = False) -> None:
    """Bring the summaries of a document of speeds up to its records.

    Args:
        against: rows to compare all others with from now on; as before by default.
        by_cpu_time: whether speeds are of processor time from now on; as before by default.
    """
    if document["kind"] != SPEEDS:
        for name, value in {"against": against, "by_cpu_time": by_cpu_time}.items():
            if value:
                raise ConfigError(name, "must come with a document of speeds", document["kind"], "Leave it out.")
        return
    document["by_cpu_time"] = by_cpu_time or document.get("by_cpu_time", False)
    clock = "cpu_seconds" if document["by_cpu_time"] else "seconds"
    if against is not None:
        check_against(against, [row["name"] for entry in document["models"] for row in entry["rows"]])
        document["against"] = list(against)
    for entry in document["models"]:
        entry["summary"] = summarize(entry["records"], entry["rows"], document.get("against", ()), clock)


def check_against(against: Iterable[str], rows: Sequence[str]) -> None:
    """Raise unless all names in `against` are among `rows`."""
    for name in against:
        if name not in rows:
            raise unknown_name("against", name, rows)


def check_continues(document: Document, fresh: Document) -> None:
    """Raise unless `document` was begun as `fresh` is; the number of rounds may differ.

    Raises:
        ConfigError: names what differs.
    """
    if document.get("kind") != SPEEDS:
        raise ConfigError("resume", "must be a document of speeds", document.get("kind"), "Check the file.")
    _check_same("models", *([entry["name"] for entry in part["models"]] for part in (document, fresh)))
    _check_same("prompts", document["prompts"], fresh["prompts"])
    for name in SAME_HEADER:
        _check_same(name, document["header"][name], fresh["header"][name])
    for name, value in fresh["settings"].items():
        if name != "rounds":
            _check_same(name, document["settings"].get(name), value)
    for entry, other in zip(document["models"], fresh["models"], strict=True):
        _check_same("rows", entry["rows"], [row for row in other["rows"] if row["name"] not in entry["left_out"]])
        for name in SAME_MODEL:
            _check_same(name, entry[name], other[name])


def _check_same(name: str, old: Any, new: Any) -> None:
    if old != new:
        remedy = f"Repeat the options that it was measured with: this run has {shown(new)}."
        raise ConfigError("resume", f"must have the same {name}", old, remedy)


def speed_notes(document: Document) -> list[str]:
    """Meaning of the columns, rows that are left out, and rows that broke their promise."""
    several = len(document["models"]) > 1
    peak_memory = document["models"][0]["peak_memory"]
    clock = " of processor time" if document["by_cpu_time"] else ""
    lines = [
        f"Tasks and overall: tokens a second{clock} over those of {REFERENCE!r} next to it, median over prompts; 95 %: "
        f"bootstrap interval of overall. Equal: share of prompts with the tokens of {REFERENCE!r}.",
        "5th percentile and least: of the prompts' ratios. By CPU time: the same as overall, from the processor "
        "time of the process; the two agree on a quiet machine. "
        "Tokens a step: mean acceptance length, from the target's forwards after the prompt's. First token: median. "
        f"Peak memory: {peak_memory}{', all models loaded' if several else ''}.",
    ]
    lines += [
        f"In {dtype} torch's kernels, which {REFERENCE!r} has, round otherwise than this package's, so the other of "
        "two nearly equal tokens may be chosen, and the text differs from there on. In fp32 the texts are equal."
        for dtype in sorted({entry["dtype"] for entry in document["models"]}.difference(EXACT_DTYPES))
    ]
    for entry in document["models"]:
        of = f" of {entry['name']}" if several else ""
        lines += [f"Left out{of}: {name}: {reason}" for name, reason in entry["left_out"].items()]
    where = {
        (panel.model, panel.mode): f"{panel.model}: {panel.mode}" if several else panel.mode
        for panel in panels(document)
    }
    for panel in panels(document):
        for name, row in panel.rows.items():
            place = where[panel.model, panel.mode]
            lines += [f"{name} ({place}) decoded without drafts: {reason}" for reason in row["plain_reasons"]]
            lines += [f"{name} ({place}) refuses {', '.join(on)}: {error}" for error, on in row["errors"].items()]
    lines += [
        f"{NOT_EQUAL}: {flag.row} ({where[flag.model, flag.mode]}) gave the tokens of {REFERENCE!r} on "
        f"{flag.share_equal:.0%} of the prompts only."
        for flag in flagged(document)
    ]
    return lines
