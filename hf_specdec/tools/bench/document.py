"""The document a run leaves: JSON values only, enough to draw every table and plot, and to continue the run.

Knows nothing about models. A document of kind "speeds" has the fields

    format, kind, header, settings, prompts
    against     rows that all are compared with, beside the reference
    models      one entry a model
    is_complete whether everything asked for has been measured

and an entry has

    name, dtype, attention, model, assistant, peak_memory, rows, left_out
    records     one entry a call, by row, prompt, turn, mode and round: tokens, seconds, equality; of round -1, in which
                calls are watched and not timed, acceptance, time to first token and memory
    summary     mode -> row -> medians with intervals, rates, shares; see `statistics.summarize`

Every kind has format, kind, header and is_complete.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_specdec.common.files import check_output, check_path, replacing
from hf_specdec.errors import ConfigError, shown, unknown_name
from hf_specdec.tools.bench.journal import Journal, is_journal, line_of, read_lines
from hf_specdec.tools.bench.shapes import Misshapen, check_document
from hf_specdec.tools.bench.statistics import summarize

FORMAT = 3
SPEEDS, COST, REPLAY = "speeds", "cost", "replay"
MANY, PRECISIONS, DRAFTING, STEPS, GPU = "many", "precisions", "drafting", "steps", "gpu"
EXACT_DTYPES = ("float32", "float64")
RULE = "must be a whole document of hf-specdec bench"

Document = dict[str, Any]
Save = Callable[[Document], None]  # gets the document of a measurement so far


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


def fill(document: Document, found: Mapping[str, Iterable[Any]], save: Save | None) -> Document:
    """Measure what a document's lists hold, one after the other; `save` gets the document after each entry.

    Args:
        found: by the list's name its entries, each measured when it is asked for.

    Returns:
        The same document, complete.
    """
    for name, entries in found.items():
        for entry in entries:
            document[name].append(entry)
            if save is not None:
                save(document)
    document["is_complete"] = True
    return document


def summarize_again(document: Document, against: Sequence[str] | None = None) -> None:
    """Bring the summaries of a document of speeds up to its records.

    Args:
        against: rows to compare all others with from now on; as before by default.
    """
    if document["kind"] != SPEEDS:
        if against:
            raise ConfigError("against", "must come with a document of speeds", document["kind"], "Leave it out.")
        return
    if against is not None:
        check_against(against, [row["name"] for entry in document["models"] for row in entry["rows"]])
        document["against"] = list(against)
    for entry in document["models"]:
        entry["summary"] = summarize(entry["records"], entry["rows"], document.get("against", ()))


def check_against(against: Sequence[str], rows: Sequence[str]) -> None:
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
    names, wanted = ([entry["name"] for entry in part["models"]] for part in (document, fresh))
    pairs = {
        "models": (names, wanted),
        "prompts": (document["prompts"], fresh["prompts"]),
        **{name: (document["header"][name], fresh["header"][name]) for name in _SAME_HEADER},
        **{
            name: (document["settings"].get(name), value)
            for name, value in fresh["settings"].items()
            if name != "rounds"
        },
    }
    _check_same(pairs)
    for entry, other in zip(document["models"], fresh["models"], strict=True):
        wanted_rows = [row for row in other["rows"] if row["name"] not in entry["left_out"]]
        same = {name: (entry[name], other[name]) for name in _SAME_MODEL}
        _check_same({"rows": (entry["rows"], wanted_rows), **same})


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


def read_document(path: str | os.PathLike[str], field: str = "file") -> Document:
    """A document from a file of JSON, or of JSON lines where its name ends in `.jsonl`.

    Raises:
        ConfigError: names `field`, and what is wrong: there is no file, it is something else, or a field of it is
            missing or of another type.
    """
    document = _parsed(path, field)
    if document.get("format") != FORMAT:
        rule = f"must be a document of hf-specdec bench in format {FORMAT}"
        raise ConfigError(field, rule, document.get("format"), "Measure again.")
    try:
        check_document(document)
        summarize_again(document)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(field, RULE, str(path), f"{_what_is_wrong(error, path)}. Measure again.") from error
    return document


def _what_is_wrong(error: Exception, path: str | os.PathLike[str]) -> str:
    """What of a document is wrong, with its line where the file has several."""
    if not isinstance(error, Misshapen):
        return f"Its records do not go together: {error!r}"
    match error.path:
        case ("models", int(model), "records", int(record), *_) if is_journal(path):
            line = line_of(Path(path).read_text(encoding="utf-8"), model, record)
            return f"In line {line}, {error}"
    return f"In line 1, {error}" if is_journal(path) else str(error)


def check_document_file(field: str, path: str | os.PathLike[str]) -> None:
    """Refuse an output that cannot be written, or that holds anything but a document, before anything is measured."""
    check_output(field, path)
    if Path(path).exists() and Path(path).stat().st_size:
        _parsed(path, field)


def check_form(path: str | os.PathLike[str], kind: str) -> None:
    """Raise where a document of this kind is to be JSON lines, which hold documents of speeds and no other kind."""
    if is_journal(path) and kind != SPEEDS:
        raise ConfigError("output", "must end in .json for this kind of document", str(path), "Rename it.")


def _parsed(path: str | os.PathLike[str], field: str) -> Document:
    """A document of any format, as it stands in the file."""
    check_path(field, path, "a document of hf-specdec bench")
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = read_lines(text) if is_journal(path) else json.loads(text)
    except FileNotFoundError as error:
        remedy = "There is no such file. Check the spelling."
        raise ConfigError(field, "must be a document of hf-specdec bench", str(path), remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = f"Check the file: {reason}."
        raise ConfigError(field, "must be a document of hf-specdec bench", str(path), remedy) from error
    if not isinstance(document, dict) or "kind" not in document:
        raise ConfigError(field, "must be a document of hf-specdec bench", str(path), "Check the file.")
    return document


def write_document(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document in one go: an interrupt leaves the file as it was or as it should be.

    JSON lines are written where the name ends in `.jsonl`.

    Raises:
        ConfigError: `path` is none, or is to hold JSON lines of a document that is not one of speeds.
    """
    check_path("path", path, "a file to write")
    check_form(path, document["kind"])
    target = Path(path)
    if is_journal(target):
        Journal(target).close(document)
        return
    with replacing(target) as beside:
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


_SAME_HEADER = ("hardware", "versions", "device", "threads")
_SAME_MODEL = ("dtype", "model", "assistant")


def _check_same(pairs: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (old, new) in pairs.items():
        if old != new:
            remedy = f"Repeat the options that it was measured with: this run has {shown(new)}."
            raise ConfigError("resume", f"must have the same {name}", old, remedy)
