"""Documents of measurements, as JSON values, and their files. Knows nothing about models.

Every document has the fields

    format, kind, header, settings, models, is_complete
    tables      each a title, columns (a heading and the format of a row's fields), and rows
    notes       lines below the tables

Of kind "speeds", tables and notes follow from the records of single calls. Its other fields are

    prompts     id and task
    against     rows that all are compared with, in addition to the reference
    by_cpu_time whether speeds are of processor time
    models      one entry a model: name, dtype, attention, model, assistant, peak_memory, rows, left_out, and
      records   one a call, by row, prompt, turn, mode and round: tokens, seconds, equality; of round -1, in which calls
                are watched and not timed, acceptance, time to first token and memory
      summary   mode -> row -> medians with intervals, rates, shares; see `statistics.summarize`

A file whose name ends in `.jsonl` holds the same as JSON lines: the document without records, records, and the end.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.common.files import check_output, check_path, replacing
from hf_specdec.errors import ConfigError

FORMAT = 3
SPEEDS = "speeds"
RULE = "must be a document of hf-specdec bench"

Document = dict[str, Any]
Columns = Mapping[str, str]
Save = Callable[[Document], None]  # gets the document of a measurement so far


def add_table(document: Document, title: str, columns: Columns) -> list[dict[str, Any]]:
    """Add a table without rows; returns the list of its rows."""
    rows: list[dict[str, Any]] = []
    document["tables"].append({"title": title, "columns": dict(columns), "rows": rows})
    return rows


def fill(
    document: Document, tables: Iterable[tuple[str, Columns, Iterable[dict[str, Any]]]], save: Save | None
) -> Document:
    """Measure tables one after the other; `save` gets the document after each row.

    Args:
        tables: title, columns, and rows, each measured when it is asked for.

    Returns:
        The same document, complete.
    """
    for title, columns, rows in tables:
        kept = add_table(document, title, columns)
        for row in rows:
            kept.append(row)
            if save is not None:
                save(document)
    document["is_complete"] = True
    return document


def load_document(path: str | os.PathLike[str], field: str = "file") -> Document:
    """Document in a file, of any format.

    Raises:
        ConfigError: names `field`: there is no file, or it is something else.
    """
    check_path(field, path, "a document of hf-specdec bench")
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = _from_lines(text) if _is_lines(path) else json.loads(text)
        if not isinstance(document, dict) or "kind" not in document:
            raise ValueError("it has no kind")
    except FileNotFoundError as error:
        raise ConfigError(field, RULE, str(path), "There is no such file. Check the spelling.") from error
    except OSError as error:
        raise ConfigError(field, RULE, str(path), f"Check the file: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(field, RULE, str(path), f"Check the file: {error}.") from error
    return document


def write_document(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document in one step: an interrupt leaves the file as it was or as it should be.

    Raises:
        ConfigError: `path` is none.
    """
    check_path("path", path, "a file to write")
    text = "".join(f"{json.dumps(line)}\n" for line in _lines(document)) if _is_lines(path) else None
    with replacing(path) as temporary:
        temporary.write_text(text or json.dumps(document, indent=1) + "\n", encoding="utf-8")


def check_document_file(field: str, path: str | os.PathLike[str]) -> None:
    """Refuse an output that cannot be written, or that holds anything but a document, before anything is measured."""
    check_output(field, path)
    if Path(path).exists() and Path(path).stat().st_size:
        load_document(path, field)


def _is_lines(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix == ".jsonl"


def _lines(document: Document) -> Iterable[Document]:
    """The document without records, the records of each visit, and how the run ended."""
    entries = document["models"]
    empty = [{**entry, "records": [], "summary": {}} if "records" in entry else entry for entry in entries]
    yield {"document": {**document, "models": empty, "is_complete": False}}
    for number, entry in enumerate(entries):
        visits: dict[Any, list[Any]] = {}
        for record in entry.get("records", ()):
            key = tuple(record[name] for name in ("mode", "round", "prompt", "turn"))
            visits.setdefault(key, []).append(record)
        yield from ({"model": number, "records": records} for records in visits.values())
    yield {"end": {"is_complete": document["is_complete"]}}


def _from_lines(text: str) -> Any:
    """The document that JSON lines make, its summaries empty."""
    first, *others = map(json.loads, text.splitlines())
    document: Document = first["document"]
    for line in others:
        document.update(line.get("end", {}))
        if "model" in line:
            document["models"][line["model"]]["records"].extend(line["records"])
    return document
