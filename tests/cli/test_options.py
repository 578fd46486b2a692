"""Options: those of a dataclass are a command's own, list forms in either spelling, and help without torch."""

import dataclasses
import json
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.spread import spread
from tests.cli.conftest import Run

WRONG = {  # that break a rule, so that no model is loaded
    "--prompt_lookup_config=[0,2,[0]]": "max_draft_len",
    "--ngram_config=[0,2,[0]]": "max_draft_len",
    "--lookahead_config=[7,7]": "lookahead_config",
    "--draft_target_model_config=[0,[0],[1],False]": "draft_len",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Three options.

    Attributes:
        depths (`tuple[int, ...]`, *optional*, defaults to `(1, 2)`):
            How deep (or high): any
            number.
    """

    width: Annotated[int, typer.Option("--width", help="How wide.")]
    names: Annotated[list[str] | None, typer.Option("--name")] = None
    depths: tuple[int, ...] = (1, 2)


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
    assert call("--width", "3", "--depths", "4", "--depths", "5")[1]["sizes"] == Sizes(3, None, (4, 5))
    result, seen = call()
    assert result.exit_code == 2 and "--width" in result.output and not seen
    result, _ = call("--help")
    assert all(words in result.output for words in ("What it does.", "How wide.", "How deep (or", "--before"))


@pytest.mark.parametrize("command", ["generate", "chat", "summarize", "serve"])
def test_every_command_that_generates_knows_every_list_form(run: Run, command: str) -> None:
    for words, field in WRONG.items():
        option, _, value = words.partition("=")
        for spelled in (option, option.replace("_", "-")):
            result = run(command, f"{spelled}={value}")
            assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
            assert field in result.stderr.splitlines()[0]


def test_options_may_be_written_with_underscores(run: Run) -> None:
    words = ("--max_new_tokens", "2", "--dtype", "fp32", "--lookahead_config=[3,3,3]", "--json")
    found = json.loads(run("generate", "x = 1\n", *words).stdout)
    assert (found["spec_method"], found["spec_config"]["window_size"]) == ("lookahead", 3)
    assert len(found["token_ids"]) == 2


def test_the_names_that_are_checked_without_torch_are_those_of_the_methods() -> None:
    aliases = [alias for method in METHODS.values() for alias in method.aliases]
    assert {*options.METHODS} == {"none", *METHODS} and {*options.ALIASES} == {*aliases}


def test_help_names_every_method_and_the_list_form(run: Run) -> None:
    shown = " ".join(run("generate", "--help").stdout.replace("│", " ").split())
    assert [name for name in METHODS if name not in shown] == []
    assert "[7,7,7]" in shown  # brackets are markup to the library that prints it


@pytest.mark.parametrize("command", ["generate", "chat", "info", "fetch", "summarize"])
def test_help_imports_no_library(command: str) -> None:
    code = (
        "import sys\nfrom hf_specdec.tools.cli import app\n"
        f"try:\n    app([{command!r}, '--help'])\nexcept SystemExit:\n"
        "    print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
