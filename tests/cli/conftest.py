"""A runner for the commands."""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hf_specdec.tools.cli import app

Run = Callable[..., Result]
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def run() -> Run:
    """Call `hf-specdec` with the words given; `stdin` is what is piped in."""

    def call(*words: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(words), input=stdin)

    return call


def in_own_process(words: list[str], *, stdin: bytes = b"", stdout: str = os.devnull) -> tuple[int, str]:
    """Exit status and stderr of `hf-specdec` with these words in a fork of this process, whose imports it has.

    Args:
        stdin: what is piped in.
        stdout: the file that standard output is.
    """
    with tempfile.TemporaryFile() as given, open(stdout, "wb") as out, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        process = os.fork()
        if not process:
            _run_forked(words, given.fileno(), out.fileno(), errors.fileno())
        _, status = os.waitpid(process, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode()


def _run_forked(words: list[str], *files: int) -> None:
    """The command with these files as its standard ones; ends the process."""
    status: Any = 1
    try:
        for place, file in enumerate(files):
            os.dup2(file, place)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(0),
            os.fdopen(1, "w"),
            os.fdopen(2, "w", buffering=1),
        )
        app(words)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Processes started within hear SIGINT, which a shell's background jobs and what they start ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
