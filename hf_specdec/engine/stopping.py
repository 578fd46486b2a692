"""Ends texts: each stopping criterion is asked once for each emitted token, in order, as in plain decoding."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec import compat
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.forward.target.token_buffer import TokenBuffer


class StopCheck:
    """Returns whether the text ends with its last token. Length and end-of-text are checked without touching a tensor.

    Attributes:
        is_watched (`bool`): whether a criterion of the user's own is asked, which may keep count.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.max_length: int | None = None
        self.quiet_length: float = float("inf")
        self.eos: frozenset[int] = frozenset()
        self.others: list[Callable[..., Any]] = []
        for criterion in criteria:
            if type(criterion) is compat.MaxLengthCriteria and self.max_length is None:
                self.max_length = criterion.max_length
                self.quiet_length = criterion.max_position_embeddings or float("inf")
                self._length_criterion = criterion
            elif type(criterion) is compat.EosTokenCriteria and not self.eos:
                self.eos = frozenset(_ids(criterion.eos_token_id))
            else:
                self.others.append(criterion)
        own = (compat.MaxTimeCriteria, compat.StopStringCriteria)
        self.is_watched = any(type(criterion) not in own for criterion in self.others)

    def __call__(self, text: TokenBuffer, scores: list[torch.Tensor] | None) -> bool:
        """Ask every criterion, each once, as plain decoding does."""
        stop = text.tokens[-1] in self.eos or (self.max_length is not None and len(text) >= self.max_length)
        if not self.others and len(text) <= self.quiet_length:
            return stop
        given = tuple(scores) if scores is not None else None
        if len(text) > self.quiet_length:
            self._length_criterion(text.ids(), given)  # warns once that the model's positions are exceeded
        for criterion in self.others:
            stop = bool(torch.as_tensor(criterion(text.ids(), given)).all()) or stop
        return stop


def agreed_criteria(criteria: StoppingCriteriaList, rank_sync: RankSync) -> StoppingCriteriaList:
    """The criteria for transformers' own loops, where all processes stop as the first one does."""
    if type(rank_sync) is RankSync:
        return criteria
    alike = (compat.MaxLengthCriteria, compat.EosTokenCriteria, compat.StopStringCriteria)
    return StoppingCriteriaList(
        criterion if type(criterion) in alike else _AgreedCriterion(criterion, rank_sync) for criterion in criteria
    )


class _AgreedCriterion(StoppingCriteria):
    """Result of a criterion in the first process."""

    def __init__(self, criterion: Callable[..., Any], rank_sync: RankSync) -> None:
        self.criterion, self.rank_sync = criterion, rank_sync

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        own = torch.as_tensor(self.criterion(input_ids, scores, **kwargs)).expand(len(input_ids))
        agreed = [bool(self.rank_sync.decide_now(lambda row=row: int(row))) for row in own]  # type: ignore[misc]
        return torch.tensor(agreed, device=input_ids.device)  # type: ignore[return-value]


def _ids(value: torch.Tensor | Iterable[int]) -> list[int]:
    return [int(token) for token in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)]
