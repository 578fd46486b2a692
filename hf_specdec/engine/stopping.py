"""Ends texts: each stopping criterion is asked once for each emitted token, in order, as in plain decoding."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec.forward.text_rows import TokenBuffer


class StopCheck:
    """Returns whether a text ends with its last token. Length and end-of-text are checked without a tensor."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.max_length: int | None = None
        self.quiet_length: float = float("inf")
        self.eos: frozenset[int] = frozenset()
        self.others: list[Callable[..., Any]] = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria and self.max_length is None:
                self.max_length = criterion.max_length
                self.quiet_length = criterion.max_position_embeddings or float("inf")
                self._length_criterion = criterion
            elif type(criterion) is EosTokenCriteria and not self.eos:
                self.eos = frozenset(_ids(criterion.eos_token_id))
            else:
                self.others.append(criterion)

    def __call__(self, text: TokenBuffer, scores: list[torch.Tensor] | None) -> bool:
        """Ask every criterion, each once, as plain decoding does."""
        stop = text.tokens[-1] in self.eos or (self.max_length is not None and len(text) >= self.max_length)
        if not self.others and len(text) <= self.quiet_length:
            return stop
        kept_scores = tuple(scores) if scores is not None else None
        if len(text) > self.quiet_length:
            self._length_criterion(text.ids(), kept_scores)  # warns once that the model's positions are exceeded
        for criterion in self.others:
            stop = bool(torch.as_tensor(criterion(text.ids(), kept_scores)).all()) or stop
        return stop


def _ids(value: torch.Tensor | Iterable[int]) -> list[int]:
    return [int(token) for token in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)]
