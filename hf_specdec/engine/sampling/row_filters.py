"""Filters a row's draws by `top_k`, `top_p` and `min_p` on the host, from the row's best scores.

The three keep a row's best tokens down to some score. The token that plain decoding draws is therefore the first of
the row's draws, in the order of p / e over the whole vocabulary, that they keep; no mask over the vocabulary is made.
Where ties or rounding decide, there is no answer.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Array = npt.NDArray[Any]
NUM_RANKS = 16  # draws of each row among which one is kept
NUM_SCORES = 64  # best scores that are read of each row, at least
NUM_WITHOUT_TOP_K = 512  # `top_p` and `min_p` keep hundreds where the target prefers none
NUM_TIES = 32  # of them beyond the first `top_k`, at least
MOST_TOP_K = 512  # a larger one reads too many scores
ROUNDING = 2e-5  # what rounding can change of a probability's share, or of the ratio of two p / e, at most
# In the order in which `generate` has them: class, name of its setting, and a value to compare it at.
FILTERS: tuple[tuple[Any, str, Any], ...] = (
    (TopKLogitsWarper, "top_k", 5),
    (TopPLogitsWarper, "top_p", 0.8),
    (MinPLogitsWarper, "min_p", 0.1),
)


class RowFilters:
    """The filters of a call, in the order in which `generate` has them; see `of`.

    Args:
        top_k: of a `TopKLogitsWarper`; 0 without one.
        top_p: of a `TopPLogitsWarper`; 1 without one.
        min_p: of a `MinPLogitsWarper`; 0 without one.
    """

    def __init__(self, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
        self.top_k, self.top_p, self.min_p = top_k, top_p, min_p

    @classmethod
    def of(cls, processors: Sequence[Any]) -> "RowFilters | None":
        """`None` where these processors are not at most one of each filter, in `generate`'s order, as it sets them.

        So it is where the installed transformers keeps other tokens than the rules here.
        """
        given = [(processor, name) for kind, name, _ in FILTERS for processor in processors if type(processor) is kind]
        if not given or [processor for processor, _ in given] != list(processors):
            return None
        values: dict[str, Any] = {}
        for processor, name in given:
            if name in values or processor.filter_value != -np.inf:
                return None
            if name != "top_k" and processor.min_tokens_to_keep != 1:
                return None
            values[name] = getattr(processor, name)
        return cls(**values) if values.get("top_k", 0) <= MOST_TOP_K and _rules_hold() else None

    def wanted(self, scores: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of `first_kept` from `(T, vocab_size)` scores, `(T, ...)` each."""
        num_scores = max(NUM_SCORES, self.top_k + NUM_TIES) if self.top_k else NUM_WITHOUT_TOP_K
        best = scores.topk(min(num_scores, scores.shape[-1]), dim=-1)
        if self.top_k or self.top_p == 1.0:
            return best.values, best.indices
        return best.values, best.indices, probabilities.amax(dim=-1)

    def first_kept(self, ratios: Array, drawn: Array, wanted: Sequence[Array], vocab_size: int) -> int | None:
        """The first of the `drawn` tokens that all filters keep; `None` where that is not sure.

        Args:
            ratios: `(R,)` fp32, p / e of the drawn tokens, descending; p before the filters.
            wanted: one row of what `wanted` gives.
        """
        if not math.isfinite(wanted[0][0]):
            return None
        row, found = _Row(self, wanted, vocab_size), ratios.tolist()
        for place, token in enumerate(drawn.tolist()):
            is_kept = row.keeps(token)
            if is_kept is None:
                return None
            if is_kept:
                below = found[place + 1] if place + 1 < len(found) else 0.0
                is_last = place + 1 == len(found) < vocab_size
                is_sure = not is_last and math.isfinite(found[place]) and below < found[place] * (1.0 - ROUNDING)
                return int(token) if is_sure else None
        return None


@functools.cache
def _rules_hold() -> bool:
    """Returns whether transformers' filters keep the tokens of one row that the rules here keep."""
    scores = (torch.arange(24, device="cpu") * 7 % 24).to(torch.float32)[None] / 4.0  # (1, 24), no two alike
    ids = torch.zeros((1, 1), dtype=torch.long, device="cpu")
    for kind, name, value in FILTERS:
        own, theirs = RowFilters(**{name: value}), kind(value)(ids, scores).isfinite()[0].tolist()
        row = [part[0].numpy() for part in own.wanted(scores, scores.softmax(dim=-1))]
        ours = [_Row(own, row, scores.shape[-1]).keeps(token) for token in range(scores.shape[-1])]
        if ours != theirs:
            return False
    return True


class _Row:
    """One row's best scores, `(M,)`, descending, and their tokens."""

    def __init__(self, filters: RowFilters, wanted: Sequence[Array], vocab_size: int) -> None:
        self.filters, (self.scores, self.tokens, *greatest) = filters, wanted
        self.ascending = -self.scores
        self.best, self.least = float(self.scores[0]), float(self.scores[-1])  # no other token has a greater score
        self.cut = float(self.scores[min(filters.top_k, len(self.scores)) - 1]) if filters.top_k else -math.inf
        self.shares = np.zeros(1)
        if filters.top_p == 1.0:
            return
        sums = np.exp(self.scores.astype(np.float64) - self.best).cumsum()
        if greatest:
            total = 1.0 / float(greatest[0])
        elif len(self.scores) == vocab_size or self.least < self.cut:
            total = float(sums[int(self.ascending.searchsorted(-self.cut, "right")) - 1])
        else:
            total = math.nan  # ties with the last of the `top_k` may not be among these scores
        self.shares = sums / total  # (M,), of a score and all before it

    def keeps(self, token: int) -> bool | None:
        """Returns whether all filters keep a token; `None` where that is not sure."""
        place = (self.tokens == token).nonzero()[0]
        if not len(place):
            return self._keeps_other()
        score = float(self.scores[place[0]])
        if score < self.cut:
            return False
        by_top_p = True if self.filters.top_p == 1.0 else self._kept_by_top_p(score)
        by_min_p = True if self.filters.min_p == 0.0 else self._kept_by_min_p(score)
        if False in (by_top_p, by_min_p):
            return False
        return None if None in (by_top_p, by_min_p) else True

    def _kept_by_top_p(self, score: float) -> bool | None:
        """`top_p` keeps some of the equal scores at its end; which ones depends on the sort."""
        first, end = (int(self.ascending.searchsorted(-score, side)) for side in ("left", "right"))
        above = float(self.shares[first - 1]) if first else 0.0
        last = float(self.shares[end - 2]) if end > first + 1 else above  # of what may stand before it
        if (first, end) == (0, 1) or last < self.filters.top_p - ROUNDING:
            return True
        return False if above >= self.filters.top_p + ROUNDING else None

    def _kept_by_min_p(self, score: float) -> bool | None:
        ratio = math.exp(score - self.best) / self.filters.min_p
        return None if abs(ratio - 1.0) <= ROUNDING else ratio > 1.0

    def _keeps_other(self) -> bool | None:
        """`keeps` of a token that is not among the best: `False` where none of those can be kept."""
        by_top_p, by_min_p = self.filters.top_p < 1.0, self.filters.min_p > 0.0
        is_out = (
            self.least < self.cut
            or (by_min_p and self._kept_by_min_p(self.least) is False)
            or (by_top_p and self._is_beyond_top_p())
        )
        return False if is_out else None

    def _is_beyond_top_p(self) -> bool:
        """Returns whether those with greater scores than the least, which none of the others reaches, are enough."""
        num_above = int(self.ascending.searchsorted(-self.least, "left"))
        return num_above > 0 and bool(self.shares[num_above - 1] >= self.filters.top_p + ROUNDING)
