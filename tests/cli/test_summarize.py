"""`hf-specdec summarize`: ROUGE of plain generation and of a method, and an exit code that checks them."""

import itertools
import json
import sys
from typing import Any

import pytest

from hf_specdec.tools.summarize.run import Summarizer, Summary
from tests.cli.conftest import Run

SHORT = ("summarize", "--limit", "2", "--max-input-tokens", "40", "--max-new-tokens", "8", "--dtype", "fp32")
LOOKUP = ("--prompt-lookup-config", "[4,2,['cpu']]")


def test_the_method_scores_as_plain_generation(run: Run) -> None:
    result = run(*SHORT, *LOOKUP, "--check-accuracy", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    plain, ours = document["rows"]
    assert (plain["name"], ours["name"]) == ("plain generate", "prompt_lookup")
    for field in ("summaries", "rouge1", "rouge2", "rougeL", "rougeLsum", "num_tokens"):
        assert ours[field] == plain[field]
    assert ours["num_equal_to_plain"] == len(ours["summaries"]) == 2
    assert ours["tokens_per_second"] > 0


def test_the_table_shows_both_and_a_missed_threshold_fails_the_check(run: Run) -> None:
    result = run(*SHORT, *LOOKUP, "--check-accuracy", "--rouge1-threshold", "99")
    assert result.exit_code == 1
    assert "below 99.00" in result.stderr
    for word in ("plain generate", "prompt_lookup", "rouge1", "rougeLsum", "tokens_per_second", "dtype float32"):
        assert word in result.stdout


def test_other_tokens_fail_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two summaries has a wrong last token, which decodes to nothing that ROUGE would see."""
    real, written = Summarizer.write, itertools.count()

    def wrong(self: Summarizer, article: Any, method: Any) -> Summary:
        summary = real(self, article, method)
        if method["spec_method"] and next(written) == 1:  # the first after the warm-up
            return Summary([*summary.token_ids[:-1], -1], summary.text, summary.seconds)
        return summary

    monkeypatch.setattr(Summarizer, "write", wrong)
    result = run(*SHORT, *LOOKUP, "--check-accuracy")
    assert result.exit_code == 1
    assert "share of equal summaries is 0.50, below 1.00" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec-method", "none"), "`spec_method` must be a method"),
        (("--articles", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--rouge1-threshold", "1"), "`rouge1_threshold` must come with check_accuracy"),
    ],
)
def test_mistakes_are_named(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run(*SHORT, *words)
    assert result.exit_code == 2 and message in result.stderr


def test_without_rouge_the_install_line_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    result = run(*SHORT)
    assert result.exit_code == 2 and 'pip install "hf_specdec[bench]"' in result.stderr
