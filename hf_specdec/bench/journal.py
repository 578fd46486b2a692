"""A document of speeds as JSON lines, written while measuring: a visit is appended, nothing is written twice.

A run that is killed leaves a file whose whole lines hold everything that was measured; a last line that was cut off is
dropped when the file is read. Lines are

    {"document": ...}                                           what is known before the first call
    {"model": 0, "records": [...]}                              one model's visit, all of its rows or none
    {"end": {"is_complete": true}}                              the run ended, or was interrupted
"""

import json
import os
from pathlib import Path
from typing import Any

from hf_specdec.files import replacing

__all__ = ["Journal", "is_journal", "read_lines"]

Document = dict[str, Any]


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name holds JSON lines."""
    return Path(path).suffix == ".jsonl"


class Journal:
    """One file. What is there is replaced at the first `save`, with all that the document holds by then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._written: list[int] = []  # of each model's records, how many are in the file

    def save(self, document: Document) -> None:
        """Append what has been measured since the last time."""
        if self._written:
            self._append(self.path, self._news(document))
            return
        self._written = [0] * len(document["models"])
        entries = [{**entry, "records": [], "summary": {}} for entry in document["models"]]
        first = {"document": {**document, "models": entries, "is_complete": False}}
        with replacing(self.path) as beside:
            self._append(beside, [first, *self._news(document)])

    def close(self, document: Document) -> None:
        """Append the rest and how the run ended."""
        self.save(document)
        self._append(self.path, [{"end": {"is_complete": document["is_complete"]}}])

    def _news(self, document: Document) -> list[Document]:
        fresh = [entry["records"][done:] for entry, done in zip(document["models"], self._written, strict=True)]
        self._written = [len(entry["records"]) for entry in document["models"]]
        return [{"model": number, "records": records} for number, records in enumerate(fresh) if records]

    def _append(self, path: Path, lines: list[Document]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def read_lines(text: str) -> Any:
    """The document that the lines of a journal make, its summaries empty.

    Raises:
        ValueError: they are something else.
    """
    *whole, cut_off = text.split("\n")
    lines = [json.loads(line) for line in whole] if whole else [json.loads(cut_off)]
    if not lines or not isinstance(lines[0], dict) or "document" not in lines[0]:
        raise ValueError("its first line is not the beginning of a journal")
    document: Document = lines[0]["document"]
    try:
        for line in lines[1:]:
            document.update(line.get("end", {}))
            if "model" in line:
                document["models"][line["model"]]["records"].extend(line["records"])
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"a line is none of a journal: {error!r}") from error
    return document
