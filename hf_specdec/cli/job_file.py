"""The output of a long job: a line a prompt, appended as results finish, complete after any interruption.

Knows nothing about models. A job that is started again finds what is done and goes on; the finished file is sorted by
prompt, so an interrupted job and an uninterrupted one leave the same file.

    file = JobFile(path, {"model": "...", "max_new_tokens": 64})
    done = file.recover()                   # numbers of the prompts that are done
    file.append({"index": 3, "text": "..."})
    file.finish()
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.errors import ConfigError

__all__ = ["JobFile"]


class JobFile:
    """A `.jsonl` file that several processes append to.

    Args:
        path: the file; it need not exist.
        settings: everything that decides the results, JSON values. A file of another job is refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        text = json.dumps(settings, sort_keys=True, default=str)
        self.job = hashlib.sha256(text.encode()).hexdigest()[:16]

    def recover(self) -> set[int]:
        """Drop a line that was cut off by an interruption; returns the numbers of the prompts that are done.

        One process does this before any appends.

        Raises:
            ConfigError: the file belongs to another job, or is none of a job.
        """
        lines = self._lines()
        self._write(lines)
        return set(lines)

    def done(self) -> set[int]:
        """The numbers of the prompts that are done."""
        return set(self._lines())

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one result; a single write, so that lines of several processes never mix."""
        text = "\n" + json.dumps({**line, "job": self.job}, ensure_ascii=False) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text.encode("utf-8"))
        finally:
            os.close(descriptor)

    def finish(self) -> int:
        """Sort the file by prompt; returns the number of lines."""
        lines = self._lines()
        self._write(lines)
        return len(lines)

    def _lines(self) -> dict[int, str]:
        """Whole lines by prompt number; of two for one prompt, the first."""
        if not self.path.exists():
            return {}
        found: dict[int, str] = {}
        for text in self.path.read_text("utf-8", errors="replace").split("\n"):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # cut off by an interruption
            if not isinstance(line, dict) or line.get("job") != self.job or not isinstance(line.get("index"), int):
                raise ConfigError(
                    "--out",
                    "must be a new file, or one of the same job (model, prompts, method and options)",
                    str(self.path),
                    "Choose another file, or remove this one to start anew.",
                )
            found.setdefault(line["index"], text)
        return found

    def _write(self, lines: Mapping[int, str]) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(lines[index] + "\n" for index in sorted(lines)), encoding="utf-8")
        beside.replace(self.path)
