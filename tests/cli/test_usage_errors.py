"""Words that are no options, or no values of them: an error that names the option, and exit code 2."""

import pytest

from tests.cli.conftest import Run

CASES = [
    ("generate x --max-new-tokens 0", "--max-new-tokens"),
    ("generate x --max_new_tokens=x", "--max-new-tokens"),
    ("serve --port 99999", "--port"),
    ("train --kind foo", "--kind"),
    ("train", "--out"),
    ("generate x --max-new-token 3", "--max-new-tokens"),  # what is meant is said
    ("generate x --rounds", "--rounds"),
    ("generate x y", "y"),
    ("gennerate", "generate"),
    ("--no-such", "--no-such"),
]


@pytest.mark.parametrize(("line", "named"), CASES, ids=[line for line, _ in CASES])
def test_a_wrong_word_is_an_error_that_names_it(run: Run, line: str, named: str) -> None:
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr and "Traceback" not in result.stderr


def test_a_value_of_the_environment_is_checked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "abc")
    result = run("demo")
    assert result.exit_code == 2
    assert "GRADIO_SERVER_PORT" in result.stderr


def test_the_help_stays(run: Run) -> None:
    assert run("generate", "--help").exit_code == 0
    assert "Usage: " in run().output
