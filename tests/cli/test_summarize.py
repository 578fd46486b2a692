"""`hf-specdec summarize`: ROUGE of plain generation and of a method, and an exit code that checks them."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.tools.summarize.run import Summaries, Summarizer
from tests.cli.conftest import Run

pytestmark = pytest.mark.each_value_in_file

SHORT = ("summarize", "--limit", "2", "--max-input-tokens", "40", "--max-new-tokens", "8", "--dtype", "fp32")
LIST_FORMS = {
    "prompt_lookup": ("--prompt-lookup-config", "[4,2,['cpu']]"),
    "lookahead": ("--lookahead-config", "[3,3,3]"),
    "draft_model": ("--draft-target-model-config", "[3,['cpu'],['cpu'],False]"),
    "auto": ("--auto-config", '{"num_nodes": 6}'),
}


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", LIST_FORMS)
def test_every_method_scores_as_plain_generation(run: Run, method: str) -> None:
    result = run(*SHORT, *LIST_FORMS[method], "--check-accuracy", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    plain, ours = document["rows"]
    assert (plain["name"], ours["name"]) == ("plain generate", method)
    assert ours["summaries"] == plain["summaries"]
    assert ours["num_equal_to_plain"] == plain["num_equal_to_plain"] == document["num_articles"] == 2
    for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum", "num_tokens"):
        assert ours[kind] == plain[kind]
    assert ours["tokens_per_second"] > 0


def test_the_table_shows_both(run: Run) -> None:
    result = run(*SHORT, "--spec-method", "prompt_lookup", "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    for word in ("plain generate", "prompt_lookup", "ROUGE-1", "ROUGE-Lsum", "tokens/s", "2 of 2"):
        assert word in result.stdout


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["table", "json"])
def test_an_interrupt_leaves_the_articles_that_are_complete(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Ctrl-C in the second article, after one of the two ways; the threshold that is missed is not looked at."""
    interrupt_at(monkeypatch, call=2 + 2 + 1)  # of two ways: a call to warm up, and one for the first article
    checked = ("--check-accuracy", "--rouge1-threshold", "99")
    result = run(*SHORT, *LIST_FORMS["prompt_lookup"], *checked, *words)
    assert result.exit_code == 130
    assert result.stderr == "interrupted: what has been measured follows\n"
    if words:
        document = json.loads(result.stdout)
        assert (document["num_articles"], document["is_complete"]) == (1, False)
        assert [len(row["summaries"]) for row in document["rows"]] == [1, 1]
        assert [row["num_equal_to_plain"] for row in document["rows"]] == [1, 1]
    else:
        assert "1 of 1" in result.stdout


@pytest.mark.parametrize("call", [1, 2 + 1])
def test_an_interrupt_before_an_article_is_complete_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    interrupt_at(monkeypatch, call=call)
    result = run(*SHORT, *LIST_FORMS["prompt_lookup"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted\n"


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *, call: int) -> None:
    """Ctrl-C at the end of the call that summarises, counted from 0: its summary is there, but not told yet."""
    real, counted = Summarizer.write, itertools.count()

    def write(*args: Any) -> None:
        real(*args)
        if next(counted) == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(Summarizer, "write", write)


def test_a_rouge_score_below_the_threshold_fails_the_check(run: Run) -> None:
    missed = run(*SHORT, *LIST_FORMS["prompt_lookup"], "--check-accuracy", "--rouge1-threshold", "99")
    assert missed.exit_code == 1
    assert "below 99.00" in missed.stderr


@pytest.mark.parametrize("option", ["--rouge1-threshold", "--equal-threshold"])
def test_a_threshold_that_nothing_is_compared_with_is_refused(run: Run, option: str) -> None:
    result = run(*SHORT, *LIST_FORMS["prompt_lookup"], option, "1")
    assert result.exit_code == 2
    assert f"`{option}` must be left out without --check-accuracy" in " ".join(result.stderr.split())


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("options", "exit_code"), [((), 1), (("--equal-threshold", "0.5"), 0)])
def test_other_tokens_fail_the_check(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], exit_code: int
) -> None:
    """One of two summaries has a wrong last token, which decodes to nothing that ROUGE would see."""
    real = Summarizer.write

    def wrong(self: Summarizer, articles: Any, into: Any, how: Any) -> None:
        real(self, articles, into, how)
        if how and len(into.token_ids) == 1:
            into.token_ids[0] = [*into.token_ids[0][:-1], -1]

    monkeypatch.setattr(Summarizer, "write", wrong)
    result = run(*SHORT, *LIST_FORMS["prompt_lookup"], "--check-accuracy", *options)
    assert result.exit_code == exit_code
    assert "1 of 2" in result.stdout
    assert ("below 100%" in result.stderr) == bool(exit_code)


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("dtype", "is_told"), [("bf16", True), ("fp32", False)])
def test_other_tokens_in_half_precision_come_with_the_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str, is_told: bool
) -> None:
    monkeypatch.setattr(Summaries, "num_equal", lambda self, other: 1)
    result = run(*SHORT, *LIST_FORMS["prompt_lookup"], "--dtype", dtype)
    assert result.exit_code == 0, result.stderr
    assert "1 of 2" in result.stdout
    assert ("in bfloat16 a near-tie may fall the other way; --dtype fp32" in result.stderr) == is_told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec-method", "none"), "--spec-method"),
        (("--dataset", "a", "--articles", "b.jsonl"), "--dataset"),
        (("--articles", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--prompt-template", "nothing"), "{article}"),
    ],
)
def test_mistakes_are_named(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    result = run(*SHORT, *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_rouge_the_install_line_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    result = run(*SHORT)
    assert result.exit_code == 2
    assert 'pip install "hf_specdec[bench]"' in result.stderr
