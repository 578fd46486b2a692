"""ROUGE scores of summaries, by Google's `rouge-score`."""

import re
from collections.abc import Sequence
from statistics import fmean

from hf_specdec.errors import import_extra

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")  # words, pairs, longest subsequence, the same by sentence
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def check_rouge() -> None:
    """Raise MissingExtraError where `rouge-score` is not installed."""
    import_extra("rouge_score", "bench", "ROUGE")


def score(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compare every summary with its reference: mean F-measures over all, from 0 to 100, of each of `KINDS`.

    Raises:
        MissingExtraError: `rouge-score` is not installed.
    """
    check_rouge()
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS))
    pairs = zip(references, summaries, strict=True)
    scores = [scorer.score(_by_sentence(reference), _by_sentence(summary)) for reference, summary in pairs]
    return {kind: 100 * fmean(of_one[kind].fmeasure for of_one in scores) for kind in KINDS}


def _by_sentence(text: str) -> str:
    """The text with one sentence a line, which is what rougeLsum goes by."""
    return SENTENCE_END.sub("\n", text.strip())
