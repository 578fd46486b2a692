"""The document a run leaves: JSON values only, enough to draw every table and plot, and to continue the run.

Knows nothing about models. Fields of a document of kind "speeds":

    format, kind, header, settings, rows, prompts, left_out
    probes      one entry a row, prompt, turn and mode: acceptance, time to first token, memory
    records     one entry a row, prompt, turn, mode and round: tokens, seconds, equality
    summary     mode -> row -> medians with intervals, rates, shares; see `statistics.summarize`
    is_complete whether everything asked for has been measured

    write_document(document, "bench.json")
    flagged(document)
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.bench.prompts import Prompt
from hf_specdec.errors import ConfigError

__all__ = [
    "COST",
    "FORMAT",
    "REPLAY",
    "SPEEDS",
    "check_continues",
    "flagged",
    "new_document",
    "read_document",
    "write_document",
]

FORMAT = 1
SPEEDS, COST, REPLAY = "speeds", "cost", "replay"
EXACT_DTYPES = ("float32", "float64")

Document = dict[str, Any]


def new_document(
    header: Mapping[str, Any], settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]
) -> Document:
    """A document with nothing measured yet."""
    return {
        "format": FORMAT,
        "kind": SPEEDS,
        "header": dict(header),
        "settings": _json_values(settings),
        "rows": [dict(row) for row in rows],
        "prompts": [{"id": prompt.id, "task": prompt.task} for prompt in prompts],
        "left_out": {},
        "probes": [],
        "records": [],
        "summary": {},
        "is_complete": False,
    }


def check_continues(document: Document, fresh: Document) -> None:
    """Raise unless `document` was begun as `fresh` is; the number of rounds may differ.

    Raises:
        ConfigError: names what differs.
    """
    if document.get("kind") != SPEEDS or document.get("format") != FORMAT:
        raise ConfigError("resume", "must be a document of this command", document.get("kind"), "Check the file.")
    left_out = document["left_out"]
    wanted_rows = [row for row in fresh["rows"] if row["name"] not in left_out]
    pairs = {
        "rows": (document["rows"], wanted_rows),
        "prompts": (document["prompts"], fresh["prompts"]),
        **{name: (document["header"][name], fresh["header"][name]) for name in _SAME_HEADER},
        **{name: (document["settings"][name], value) for name, value in fresh["settings"].items() if name != "rounds"},
    }
    for name, (old, new) in pairs.items():
        if old != new:
            raise ConfigError("resume", f"must have the same {name}", old, f"This run has {new!r}.")


def flagged(document: Document) -> list[tuple[str, str, float]]:
    """Rows that broke their promise, as (mode, row, share of prompts equal): full precision, and tokens not plain's.

    In half precision a near-tie may fall either way, so the share is reported and nothing flagged. A sampled row is
    held to its promise only if it makes one: transformers' assisted loop draws in another order than plain sampling.
    """
    if document["header"]["dtype"] not in EXACT_DTYPES:
        return []
    promises = {row["name"]: row["is_seed_exact"] for row in document["rows"]}
    return [
        (mode, name, summary["share_equal"])
        for mode, rows in document["summary"].items()
        for name, summary in rows.items()
        if summary["share_equal"] not in (None, 1.0) and (mode == "greedy" or promises[name])
    ]


def read_document(path: str | os.PathLike[str]) -> Document:
    """A document from a file.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("file", "must be a document of hf-specdec bench", str(path), str(error)) from error
    if not isinstance(document, dict) or "kind" not in document:
        raise ConfigError("file", "must be a document of hf-specdec bench", str(path), "Check the file.")
    return document


def write_document(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document in one go: an interrupt leaves the file as it was or as it should be."""
    target = Path(path)
    draft = target.with_name(target.name + ".part")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, target)


_SAME_HEADER = ("hardware", "versions", "dtype", "device", "threads", "model", "assistant")


def _json_values(value: Any) -> Any:
    return json.loads(json.dumps(value))
