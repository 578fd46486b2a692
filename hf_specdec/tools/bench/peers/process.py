"""Processes of other libraries: `worker.py`, started with an interpreter that has the library."""

import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_specdec.errors import ConfigError, SpecError, unknown_name

WORKER = Path(__file__).with_name("worker.py")


class Library(NamedTuple):
    """One library's rows, what they need of `draft` and `head`, and how it is installed."""

    rows: Mapping[str, tuple[str, ...]]
    install: str


RETRIEVAL = ("suffix_recycle_merge", "token_recycling", "logit_spec", "adapld", "stand", "sam_decoding")
LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "economize": Library(
            {"lookup": (), "draft_model": ("draft",), "hybrid": ("draft",), "eagle3": ("head",)},
            "pip install economize==0.3.2",
        ),
        "flashspec": Library({"lookup": (), "composite": ("draft",)}, "pip install flashspec==0.3.1"),
        "dejavuu": Library(
            dict.fromkeys(RETRIEVAL, ()),
            "pip install --no-deps --ignore-requires-python dejavuu==0.2.0; pip install loguru onnxruntime",
        ),
    }
)


def read_pythons(given: Iterable[str]) -> dict[str, str]:
    """Interpreters by library, from texts `LIBRARY=PATH`."""
    parts = [text.partition("=") for text in given]
    for name, equals, path in parts:
        if not (name and equals and path):
            raise ConfigError("peer_python", "must be LIBRARY=PATH", name, "For example economize=env/bin/python.")
        if shutil.which(path) is None:
            raise ConfigError("peer_python", "must name a program that is there", path, "Correct the path.")
    return {name: path for name, _, path in parts}


class Processes:
    """Processes of one model, each started with its first row and ended with this object.

    Args:
        pythons: interpreters by library; this one by default.
        setup: what each process is told first; see `worker.py`.
    """

    def __init__(self, pythons: Mapping[str, str], setup: Mapping[str, Any]) -> None:
        for name in pythons:
            if name not in LIBRARIES:
                raise unknown_name("peer_python", name, LIBRARIES)
        self.pythons, self.setup = pythons, setup
        self._started: dict[str, Process | SpecError] = {}

    def of_row(self, library: str, row: str) -> "Process":
        """The process that runs a library's row.

        Raises:
            ConfigError: there is no such row, or the model has no draft or head that it needs.
            SpecError: the library is not there, or does not take the model.
        """
        rows = LIBRARIES[library].rows
        if row not in rows:
            raise unknown_name("row", row, rows)
        for part in rows[row]:
            if self.setup[part] is None:
                option = "--draft-model" if part == "draft" else "--head"
                raise ConfigError(f"{library}:{row}", f"must have a {part} on disk", None, f"Name one with {option}.")
        if library not in self._started:
            python = self.pythons.get(library, sys.executable)
            try:
                self._started[library] = Process(library, python, self.setup)
            except SpecError as error:
                self._started[library] = error
        found = self._started[library]
        if isinstance(found, SpecError):
            raise found
        return found

    def end(self, library: str) -> None:
        """End a library's process, which the next row starts anew."""
        started = self._started.pop(library, None)
        if isinstance(started, Process):
            started.end()


class Process:
    """A library's process.

    Attributes:
        versions (`dict[str, str]`): of the library, transformers and torch.
        pid (`int`): of the process.
        end: ends the process.
    """

    def __init__(self, library: str, python: str, setup: Mapping[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        command = [python, str(WORKER), library]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            self._errors.close()
            raise ConfigError("peer_python", "must be a Python interpreter", python, f"{error.strerror}.") from error
        self.end = weakref.finalize(self, _end, self._process, self._errors)
        self.pid = self._process.pid
        answer = self.ask(setup)
        if "error" in answer:
            is_missing = answer["error"].startswith(("ImportError", "ModuleNotFoundError", "PackageNotFoundError"))
            remedy = f" Install it there: {LIBRARIES[library].install}" if is_missing else ""
            raise SpecError(f"{library} does not start with {python}: {answer['error']}.{remedy}")
        self.versions: dict[str, str] = answer["versions"]

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a call, or its `error`, also where the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"its process ended with {self._process.wait()}: {''.join(last)[:200]}"}


def _end(process: "subprocess.Popen[str]", errors: Any) -> None:
    process.kill()
    process.communicate()
    errors.close()
