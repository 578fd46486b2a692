"""A logits processor that keeps the log-probabilities of tokens for clients."""

from typing import NamedTuple

import torch


class TokenScore(NamedTuple):
    """Log-probability of a token, and the most likely tokens of its place with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRecorder:
    """Keeps the log-probabilities of each row that it sees until the row's token is known; changes nothing.

    Args:
        num_top (`int`): most likely tokens of each place to tell, besides the token itself.
    """

    row_safe = True

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._rows: dict[int, torch.Tensor] = {}  # `(vocab_size,)` by the number of tokens before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep the row of `(1, length)` ids; returns the scores, `(1, vocab_size)`, as they are."""
        self._rows[input_ids.shape[1]] = scores[0].log_softmax(dim=-1)
        return scores

    def take(self, place: int, token: int) -> TokenScore:
        """The score of the token that was chosen after `place` tokens."""
        row = self._rows.pop(place)
        values, tokens = row.topk(self.num_top)
        return TokenScore(token, float(row[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
