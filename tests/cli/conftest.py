"""A runner for the commands."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from hf_specdec.cli import app

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Call `hf-specdec` with the words given; `stdin` is what is piped in."""

    def call(*words: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(words), input=stdin)

    return call
