"""`hf-specdec bench --show` and `--replay` load no model: an option that they do not read is an error."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run

__all__ = ["run"]

PLACED = (
    ("--device-map", "cpu"),
    ("--max-memory", '{"cpu": "1GB"}'),
    ("--offload-folder", "offload"),
    ("--device", "cpu"),
    ("--threads", "2"),
)
OF_MODELS = (
    *PLACED,
    ("--model", "mine"),
    ("--assistant-model", "mine"),
    ("--head", "mine"),
    ("--widen", "320x7"),
    ("--dtype", "fp32"),
    ("--draft-dtype", "fp32"),
    ("--attn-implementation", "eager"),
)
OF_PROMPTS = (
    ("--prompts", "mine.jsonl"),
    ("--limit", "2"),
    ("--limit-per-task", "2"),
    ("--random-tokens", "8x64"),
    ("--batch-size", "2"),
)
OF_RUNS = (
    ("--max-new-tokens", "5"),
    ("--rounds", "1"),
    ("--no-do-sample",),
    ("--temperature", "0.5"),
    ("--seed", "1"),
    ("--context-length", "64"),
)
UNREAD = [
    *[
        ("show", words)
        for words in (*OF_MODELS, *OF_PROMPTS, *OF_RUNS, ("--row", "auto"), ("--lookahead-config", "[7,7,7]"))
    ],
    *[("replay", words) for words in (*OF_MODELS, *OF_PROMPTS, *OF_RUNS, ("--against", "plain"))],
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a document and recorded answers."""
    monkeypatch.chdir(tmp_path)
    answers = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 1, 2, 3, 4]}
    (tmp_path / "replay").write_text(json.dumps(answers) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("kind", "words"), UNREAD, ids=lambda value: value if isinstance(value, str) else value[0])
def test_what_is_not_read_is_refused(run: Run, files: Path, kind: str, words: tuple[str, ...]) -> None:
    result = run("bench", f"--{kind}", "replay", "--output", "made.json", *words)
    assert result.exit_code == 2
    name = "--do-sample" if words[0] == "--no-do-sample" else words[0]
    assert f"error: `{name}` must be left out with --{kind}, but is " in result.stderr
    assert not (files / "made.json").exists() and result.stdout == ""


def test_what_is_read_is_taken(run: Run, files: Path) -> None:
    rows = ("--row", "prompt_lookup", "--lookahead_config=[7,7,7]")
    result = run("bench", "--replay", "replay", *rows, "--output", "made.json", "--json")
    assert result.exit_code == 0, result.stderr
    shown = run("bench", "--show", "made.json", "--json", "--rounds", "3")  # the default says nothing
    assert (shown.exit_code, json.loads(shown.stdout)) == (0, json.loads(result.stdout)), shown.stderr


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--show", "missing.json"), "`--show` must be a document of hf-specdec bench"),
        (("--replay", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_a_file_that_is_missing_is_named(run: Run, files: Path, words: tuple[str, ...], match: str) -> None:
    result = run("bench", *words)
    assert result.exit_code == 2
    assert match in result.stderr
