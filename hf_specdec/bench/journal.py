"""A document of speeds as JSON lines, written while measuring: a visit is appended, nothing is written twice.

A run that is killed leaves a file whose whole lines hold everything that was measured; a last line that was cut off is
dropped when the file is read. Lines are

    {"document": ...}                                           what is known before the first call
    {"subject": 0, "probes": [...], "records": [...]}           one model's visit, all of its rows or none
    {"end": {"is_complete": true}}                              the run ended, or was interrupted
"""

import json
import os
from pathlib import Path
from typing import Any

from hf_specdec.files import replacing

__all__ = ["Journal", "is_journal", "read_lines"]

GROWING = ("probes", "records")
LATE = ("is_complete",)

Document = dict[str, Any]


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name holds JSON lines."""
    return Path(path).suffix == ".jsonl"


class Journal:
    """One file. What is there is replaced at the first `save`, with all that the document holds by then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._written: list[dict[str, int]] = []  # for each model how much of each list is in the file

    def save(self, document: Document) -> None:
        """Append what has been measured since the last time."""
        if self._written:
            self._append(self.path, self._news(document))
            return
        self._written = [dict.fromkeys(GROWING, 0) for _ in document["subjects"]]
        entries = [{**entry, **{name: [] for name in GROWING}, "summary": {}} for entry in document["subjects"]]
        first = {"document": {**document, "subjects": entries, **dict.fromkeys(LATE, False)}}
        with replacing(self.path) as beside:
            self._append(beside, [first, *self._news(document)])

    def close(self, document: Document) -> None:
        """Append the rest and how the run ended."""
        self.save(document)
        self._append(self.path, [{"end": {name: document[name] for name in LATE}}])

    def _news(self, document: Document) -> list[Document]:
        lines = []
        for number, (entry, written) in enumerate(zip(document["subjects"], self._written, strict=True)):
            fresh = {name: entry[name][written[name] :] for name in GROWING}
            written.update({name: len(entry[name]) for name in GROWING})
            if any(fresh.values()):
                lines.append({"subject": number, **fresh})
        return lines

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
            for name in GROWING if "subject" in line else ():
                document["subjects"][line["subject"]][name] += line[name]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"a line is none of a journal: {error!r}") from error
    return document
