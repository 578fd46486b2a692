"""Which of a row's draws `top_k`, `top_p` and `min_p` keep, decided on the host from the row's best scores.

The three keep a row's best tokens down to some score. The token that plain decoding draws is therefore the first of
the row's draws, in the order of p / e over the whole vocabulary, that they keep; no mask over the vocabulary is made.
Where ties or rounding decide, there is no answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

__all__ = ["NUM_RANKS", "RowFilters"]

Array = npt.NDArray[Any]
NUM_RANKS = 16  # draws of each row among which one is kept
NUM_SCORES = 64  # best scores that are read of each row, at least
NUM_WITHOUT_TOP_K = 512  # `top_p` and `min_p` keep hundreds where the target prefers none
NUM_TIES = 32  # of them beyond the first `top_k`, at least
MOST_TOP_K = 512  # a larger one reads too many scores
DOUBT = 2e-5  # what rounding can change of a probability's share, or of the ratio of two p / e, at most
ORDER = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


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
        """`None` where these processors are not at most one of each filter, in `generate`'s order, as it sets them."""
        places = [ORDER.index(type(processor)) if type(processor) in ORDER else -1 for processor in processors]
        if not places or -1 in places or places != sorted(set(places)):
            return None
        values: dict[str, Any] = {}
        for place, processor in zip(places, processors, strict=True):
            is_top_k = place == 0
            if processor.filter_value != -np.inf or (not is_top_k and processor.min_tokens_to_keep != 1):
                return None
            name = ("top_k", "top_p", "min_p")[place]
            values[name] = getattr(processor, name)
        return cls(**values) if values.get("top_k", 0) <= MOST_TOP_K else None

    def wanted(self, scores: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `first_kept` has to see of `(T, vocab_size)` scores, `(T, ...)` each."""
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
        if not np.isfinite(wanted[0][0]):
            return None
        row = _Row(self, wanted, vocab_size)
        for place, token in enumerate(drawn.tolist()):
            is_kept = row.keeps(token)
            if is_kept is None:
                return None
            if is_kept:
                below = ratios[place + 1] if place + 1 < len(ratios) else 0.0
                is_last = place + 1 == len(ratios) < vocab_size
                is_sure = not is_last and np.isfinite(ratios[place]) and below < ratios[place] * (1.0 - DOUBT)
                return int(token) if is_sure else None
        return None


class _Row:
    """One row's best scores, `(M,)`, descending, and their tokens."""

    def __init__(self, filters: RowFilters, wanted: Sequence[Array], vocab_size: int) -> None:
        self.filters, (self.scores, self.tokens, *greatest) = filters, wanted
        self.is_whole = len(self.scores) == vocab_size
        self.least = self.scores[-1]  # no other token has a greater score
        self.weights: Array = np.exp(self.scores.astype(np.float64) - self.scores[0])
        self.cut = self.scores[min(filters.top_k, len(self.scores)) - 1] if filters.top_k else -np.inf
        if greatest:
            self.total = 1.0 / float(greatest[0])
        elif self.is_whole or self.least < self.cut:
            self.total = float(self.weights[self.scores >= self.cut].sum())
        else:
            self.total = np.nan  # ties with the last of the `top_k` may not be among these scores

    def keeps(self, token: int) -> bool | None:
        """Whether all filters keep a token; `None` where that is not sure."""
        place = np.flatnonzero(self.tokens == token)
        if not len(place):
            return self._keeps_other()
        score, weight = self.scores[place[0]], self.weights[place[0]]
        if score < self.cut:
            return False
        top_p, min_p = self.filters.top_p, self.filters.min_p
        found: list[bool | None] = [True]
        if top_p < 1.0:
            above = float(self.weights[self.scores > score].sum()) / self.total
            equal = self.weights[self.scores == score]  # `top_p` keeps some of them, which depends on the sort
            is_best = len(equal) == 1 and above == 0.0
            most = above + float(equal.sum() - weight) / self.total
            found.append(True if is_best or most < top_p - DOUBT else False if above >= top_p + DOUBT else None)
        if min_p > 0.0:
            is_sure = abs(weight - min_p) > DOUBT * min_p
            found.append(bool(weight > min_p) if is_sure else None)
        return False if False in found else None if None in found else True

    def _keeps_other(self) -> bool | None:
        """`keeps` of a token that is not among the best: `False` where none of those can be kept."""
        top_p, min_p = self.filters.top_p, self.filters.min_p
        is_out = self.least < self.cut
        is_out |= top_p < 1.0 and float(self.weights[self.scores > self.least].sum()) / self.total >= top_p + DOUBT
        is_out |= self.weights[-1] < min_p * (1.0 - DOUBT)
        return False if is_out else None
