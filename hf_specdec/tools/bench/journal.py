"""A document of speeds as JSON lines, written while measuring: a visit is appended, nothing is written twice.

A run that is killed leaves a file whose whole lines hold everything that was measured; a last line that was cut off is
dropped when the file is read. Lines are

    {"document": ...}                                           what is known before the first call
    {"model": 0, "records": [...]}                              one model's visit, all of its rows or none
    {"end": {"is_complete": true}}                              the run ended, or was interrupted
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.common.files import replacing

Document = dict[str, Any]


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name holds JSON lines."""
    return Path(path).suffix == ".jsonl"


class Journal:
    """One file. What is there is replaced at the first `save`, with all that the document holds by then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._written: list[int] | None = None  # of each model's records, how many are in the file

    def save(self, document: Document) -> None:
        """Append what has been measured since the last time.

        Raises:
            OSError: the file cannot be written, and is as it was.
        """
        if self._written is None:
            entries = [{**entry, "records": [], "summary": {}} for entry in document["models"]]
            first = {"document": {**document, "models": entries, "is_complete": False}}
            with replacing(self.path) as beside:
                _append(beside, [first, *_news(document, [0] * len(entries))])
        else:
            _append(self.path, _news(document, self._written))
        self._written = [len(entry["records"]) for entry in document["models"]]

    def close(self, document: Document) -> None:
        """Append the rest and how the run ended; raises as `save`."""
        self.save(document)
        _append(self.path, [{"end": {"is_complete": document["is_complete"]}}])


def _news(document: Document, written: Sequence[int]) -> list[Document]:
    """A line for each model that has more records than were written."""
    fresh = [entry["records"][done:] for entry, done in zip(document["models"], written, strict=True)]
    return [{"model": number, "records": records} for number, records in enumerate(fresh) if records]


def _append(path: Path, lines: Sequence[Document]) -> None:
    """All lines or none."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except BaseException:  # an interrupt too
        os.truncate(path, size)
        raise


def read_lines(text: str) -> Any:
    """The document that the lines of a journal make, its summaries empty.

    Raises:
        ValueError: they are something else; names the line.
    """
    first, *others = _values_of(text)
    if not isinstance(first, dict) or "document" not in first:
        raise ValueError("its first line is not the beginning of a journal")
    document: Document = first["document"]
    for number, line in enumerate(others, 2):
        try:
            document.update(line.get("end", {}))
            if "model" in line:
                document["models"][line["model"]]["records"].extend(line["records"])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is none of a journal: {error!r}") from error
    return document


def line_of(text: str, model: int, record: int) -> int:
    """The number from 1 of the line that holds a record, by its place among those of its model."""
    first, *others = _values_of(text)
    left = record - len(first["document"]["models"][model]["records"])
    for number, line in enumerate(others, 2):
        if left < 0:
            return number - 1
        left -= len(line["records"]) if line.get("model") == model else 0
    return len(others) + 1


def _values_of(text: str) -> list[Any]:
    """The value of each line; a last line that was cut off is left out.

    Raises:
        ValueError: a line is no JSON.
    """
    *whole, cut_off = text.split("\n")
    values = []
    for number, line in enumerate(whole or [cut_off], 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error
    return values
