"""A runner for the commands."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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


@contextlib.contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Processes started within hear SIGINT, which a shell's background jobs and what they start ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
