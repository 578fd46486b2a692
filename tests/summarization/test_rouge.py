"""ROUGE as published: common words, pairs and subsequences, as F-measures of 100."""

import sys

import pytest

from hf_specdec.errors import MissingExtraError
from hf_specdec.tools.summarize.rouge import score


def test_equal_texts_score_everything_and_foreign_ones_nothing() -> None:
    whole, none = score(["a b c"], ["a b c"]), score(["d e f"], ["a b c"])
    assert list(whole.values()) == pytest.approx([100] * 4)
    assert list(none.values()) == [0] * 4


def test_the_scores_are_those_of_the_definition() -> None:
    """Three of four words, one of three pairs, a subsequence of two (`the` and `down`, or `the` and `sat`)."""
    found = score(["the cat down sat"], ["the dog sat down"])
    assert found["rouge1"] == pytest.approx(75)
    assert found["rouge2"] == 0
    assert found["rougeL"] == pytest.approx(50)


def test_several_summaries_give_the_mean() -> None:
    assert score(["a b", "x y"], ["a b", "a b"])["rouge1"] == pytest.approx(50)


def test_sentences_are_compared_one_by_one() -> None:
    """In another order, sentences share no long subsequence as one text, and everything sentence by sentence."""
    found = score(["It rained. The bridge fell."], ["The bridge fell. It rained."])
    assert found["rougeL"] < 70
    assert found["rougeLsum"] == pytest.approx(100)


def test_without_the_package_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(MissingExtraError, match=r"hf_specdec\[bench\]"):
        score(["a"], ["a"])
