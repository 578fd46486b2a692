"""`hf-specdec bench`: an option that a measurement does not read is an error, before a model is loaded."""

import json
from pathlib import Path

import pytest

from hf_specdec.tools.cli import bench_models
from tests.cli.conftest import Run, run

__all__ = ["run"]

PLACED = (
    ("--device-map", "cpu"),
    ("--max-memory", '{"cpu": "1GB"}'),
    ("--offload-folder", "offload"),
    ("--device", "cpu"),
    ("--threads", "2"),
)
HEAD = ("--head", "mine")
OF_DRAFTS = (("--draft-model", "mine"), ("--draft-dtype", "fp32"))
OF_PRECISION = (("--dtype", "fp32"), ("--attn-implementation", "eager"))
OF_MODELS = (*PLACED, ("--model", "mine"), *OF_DRAFTS, HEAD, ("--widen", "320x7"), *OF_PRECISION)
OF_TEXTS = (
    ("--prompts", "mine.jsonl"),
    ("--limit", "2"),
    ("--random-tokens", "8x64"),
)
BATCH = ("--batch-size", "2")
OF_PROMPTS = (*OF_TEXTS, BATCH)
TOKENS, ROUNDS, SEED = ("--max-new-tokens", "5"), ("--rounds", "1"), ("--seed", "1")
OF_SAMPLING = (("--no-do-sample",), ("--temperature", "0.5"))
CONTEXT, AGAINST = ("--context-length", "64"), ("--against", "plain")
OF_RUNS = (TOKENS, ROUNDS, *OF_SAMPLING, SEED, CONTEXT)
OF_ROWS = (("--row", "auto"), ("--lookahead-config", "[7,7,7]"))
UNREAD = [
    *[("show", words) for words in (*OF_MODELS, *OF_PROMPTS, *OF_RUNS, *OF_ROWS)],
    *[("replay", words) for words in (*OF_MODELS, *OF_PROMPTS, *OF_RUNS, AGAINST)],
    *[("cost", words) for words in (*OF_DRAFTS, HEAD, *OF_PROMPTS, *OF_ROWS, AGAINST, TOKENS, *OF_SAMPLING)],
    *[("many", words) for words in (AGAINST, ROUNDS, *OF_SAMPLING, SEED, CONTEXT)],
    *[("steps", words) for words in (HEAD, BATCH, *OF_ROWS, AGAINST, TOKENS, ROUNDS, *OF_SAMPLING, SEED)],
]
FLAGS = ("cost", "many", "steps")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a document and recorded answers."""
    monkeypatch.chdir(tmp_path)
    answers = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 1, 2, 3, 4]}
    (tmp_path / "replay").write_text(json.dumps(answers) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("kind", "words"), UNREAD, ids=lambda value: value if isinstance(value, str) else value[0])
def test_what_is_not_read_is_refused(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: tuple[str, ...]
) -> None:
    monkeypatch.delattr(bench_models, "load_model")
    asked = (f"--{kind}",) if kind in FLAGS else (f"--{kind}", "replay")
    result = run("bench", *asked, "--output", "made.json", *words)
    assert result.exit_code == 2
    name = "--do-sample" if words[0] == "--no-do-sample" else words[0]
    assert f"error: `{name}` must be left out with --{kind}, but is " in result.stderr
    assert not (files / "made.json").exists() and result.stdout == ""


def test_what_speeds_do_not_read_is_refused_with_what_does(run: Run) -> None:
    result = run("bench", *CONTEXT)
    assert result.exit_code == 2
    assert "error: `--context-length` must come with --cost or --steps, but is [64]." in result.stderr


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
        (("--replay", "replay", "--row", "prompt_lookup=[0]"), "error: `--row max_draft_len` must be a whole number"),
        (("--replay", "replay", "--row", "prompt_lookup=[1"), "error: `--row` must be a list or dict in the notation"),
    ],
)
def test_what_cannot_be_read_is_named(run: Run, files: Path, words: tuple[str, ...], match: str) -> None:
    result = run("bench", *words)
    assert result.exit_code == 2
    assert match in result.stderr
