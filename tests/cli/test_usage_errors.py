"""Words that typer refuses are reported as other mistakes are: one line with field, rule and value, and a hint."""

import pytest

from tests.cli.conftest import Run

WHOLE = "must be a whole number"
CASES = [
    ("generate x --max-new-tokens 0", f"`--max-new-tokens` {WHOLE} of at least 1, but is 0.", "The default is 128."),
    ("generate x --max_new_tokens=x", f"`--max-new-tokens` {WHOLE} of at least 1, but is 'x'.", "The default is 128."),
    ("generate x --seed abc", f"`--seed` {WHOLE}, but is 'abc'.", "hf-specdec generate --help describes it."),
    ("generate x --threads 0", f"`--threads` {WHOLE} of at least 1, but is 0.", "hf-specdec generate --help desc"),
    ("generate x --rounds 0", f"`--rounds` {WHOLE} of at least 1, but is 0.", "hf-specdec generate --help desc"),
    ("generate x --batch-size 0", f"`--batch-size` {WHOLE} of at least 1, but is 0.", "hf-specdec generate --help"),
    ("bench --limit 0", f"`--limit` {WHOLE} of at least 1, but is 0.", "hf-specdec bench --help describes it."),
    ("bench --batch-size 2 --batch-size 0", f"`--batch-size` {WHOLE} of at least 1, but is 0.", "hf-specdec bench"),
    ("serve --port 99999", f"`--port` {WHOLE} from 0 to 65535, but is 99999.", "The default is 8000."),
    ("demo --max-seconds 0.5", "`--max-seconds` must be a number of at least 1, but is 0.5.", "The default is 120.0."),
    ("train --kind foo", "`--kind` must be one of 'dflash', 'draft', 'head', but is 'foo'.", "Choose one of them."),
    ("train --kind heda", "`--kind` must be one of 'dflash', 'draft', 'head', but is 'heda'.", "Did you mean 'head'?"),
    ("train", "`--out` must be given, but is None.", "Add --out: hf-specdec train --help describes it."),
    ("generate x --no-such", "`--no-such` must be an option of hf-specdec generate, but is none.", "--help lists them"),
    ("generate x --max-new-token 3", "`--max-new-token` must be an option of", "Did you mean --max-new-tokens"),
    ("generate x --rounds", "`--rounds` must have a value, but has none.", "hf-specdec generate --help describes it."),
    ("generate x --json=3", "`--json` must have no value, but has one.", "hf-specdec generate --help describes it."),
    ("generate x y", "Got unexpected extra argument(s) (y).", "quote texts with spaces."),
    ("gennerate", "`COMMAND` must be one of 'bench', 'chat', 'demo', 'generate',", "Did you mean 'generate'?"),
    ("--no-such", "`--no-such` must be an option of hf-specdec, but is none.", "hf-specdec --help lists them."),
]


@pytest.mark.parametrize(("line", "message", "hint"), CASES, ids=[line for line, _, _ in CASES])
def test_what_typer_refuses_is_an_error_and_a_hint(run: Run, line: str, message: str, hint: str) -> None:
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    error, remedy = result.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert remedy.startswith("hint: ") and hint in remedy


def test_a_value_of_the_environment_is_named_by_its_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "abc")
    result = run("demo")
    assert result.exit_code == 2
    assert f"error: `GRADIO_SERVER_PORT` {WHOLE} from 1 to 65535, but is 'abc'." in result.stderr


def test_the_help_stays(run: Run) -> None:
    assert run("generate", "--help").exit_code == 0
    assert "Usage: " in run().output
