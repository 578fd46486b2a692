"""Options in dataclasses are a command's own; every command that generates has those of the methods."""

import dataclasses
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hf_specdec.tools.cli.spread import spread
from tests.cli.conftest import Run, run

__all__ = ["run"]

LIST_FORMS = {
    "--prompt-lookup-config": "--prompt-lookup-config",
    "--ngram-config": "--prompt-lookup-config",
    "--lookahead-config": "--lookahead-config",
    "--draft-target-model-config": "--draft-model-config",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Two options."""

    width: Annotated[int, typer.Option("--width", help="How wide.")]
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def call(*words: str) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}

    @spread
    def command(*, before: int = 1, sizes: Sizes, after: bool = False) -> None:
        """What it does."""
        seen.update(before=before, sizes=sizes, after=after)

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(words)), seen


def test_fields_are_options_with_their_names_and_defaults() -> None:
    result, seen = call("--width", "3", "--name", "a", "--name", "b", "--after")
    assert result.exit_code == 0, result.output
    assert seen == {"before": 1, "sizes": Sizes(3, ["a", "b"]), "after": True}
    _, seen = call("--width", "3")
    assert seen["sizes"] == Sizes(3)


def test_a_field_without_a_default_must_be_given() -> None:
    result, seen = call()
    assert result.exit_code == 2 and "--width" in result.output and not seen


def test_help_is_the_command_s_and_the_fields() -> None:
    result, _ = call("--help")
    for words in ("What it does.", "How wide.", "--before"):
        assert words in result.output


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "summarize"])
def test_every_command_that_generates_takes_the_list_forms(run: Run, command: str) -> None:
    """A list of the wrong length is named by its option, before a model is loaded."""
    for option, name in LIST_FORMS.items():
        result = run(command, option, "[1,2,3,4,5,6]", "--model", "missing")
        assert result.exit_code == 2
        assert f"`{name}`" in result.stderr, result.stderr
