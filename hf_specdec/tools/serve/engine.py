"""Requests in a shared batch, their tokens sent to an asyncio loop as they are decided. Knows nothing of HTTP."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.tools.serve.text_stream import TextStream


class TokenScore(NamedTuple):
    """Log-probability of a token, and the most likely tokens of its place with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class NewTokens(NamedTuple):
    """Tokens that were decided, and their scores where the request wants log-probabilities."""

    token_ids: list[int]
    scores: list[TokenScore]


class Answer:
    """The tokens of one request as they are decided, and its result.

    Args:
        batch: decodes it.
        inputs: of `generate`, for one sequence. Next to these it may have its `seed`, its `stop_strings`, which end an
            answer that holds them, and `num_logprobs`: the number of most likely tokens beside each token.

    Raises:
        QueueFullError: as many texts wait as may.
    """

    def __init__(self, batch: SharedBatch, inputs: Mapping[str, Any], tokenizer: Any) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[NewTokens | None]()
        self.has_ended = threading.Event()
        kwargs = dict(inputs)
        num_logprobs, stop_strings = kwargs.pop("num_logprobs", None), kwargs.pop("stop_strings", None)
        recorder = None if num_logprobs is None else _LogprobRecorder(num_logprobs)
        text = TextStream(tokenizer, stop_strings) if stop_strings else None
        kwargs["stopping_criteria"] = [_Feed(self, kwargs["input_ids"].shape[1], recorder, text)]
        if recorder is not None:
            kwargs["logits_processor"] = [recorder, *kwargs.get("logits_processor", ())]
        self._future: Future[ManyResult] = batch.submit(kwargs)
        self._future.add_done_callback(lambda future: self.send(None))

    def end(self) -> None:
        """End it after its next token."""
        self.has_ended.set()

    def cancel(self) -> None:
        """Free its place, in the batch after the next token."""
        self.end()
        self._future.cancel()

    @property
    def result(self) -> ManyResult:
        """Its result, once it has ended.

        Raises:
            Exception: what is wrong with this request, or with the batch.
        """
        result = self._future.result()
        if result.error is not None:
            raise result.error
        return result

    async def __aiter__(self) -> AsyncIterator[NewTokens]:
        """Yield new tokens."""
        while (new := await self._queue.get()) is not None:
            yield new

    def send(self, new: NewTokens | None) -> None:
        """Take new tokens from the batch's thread, or `None` at the end."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: no one listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, new)


class _LogprobRecorder:
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


class _Feed:
    """A stopping criterion: sees every token as it is decided, and ends what no one waits for."""

    row_safe = True

    def __init__(
        self, answer: Answer, num_seen: int, recorder: _LogprobRecorder | None, text: TextStream | None
    ) -> None:
        self.answer, self.num_seen, self.recorder, self.text = answer, num_seen, recorder, text

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        token_ids = input_ids[0, self.num_seen :].tolist()
        places = enumerate(token_ids, self.num_seen)
        recorded = [] if self.recorder is None else [self.recorder.take(place, token) for place, token in places]
        self.answer.send(NewTokens(token_ids, recorded))
        self.num_seen = input_ids.shape[1]
        if self.text is not None:
            self.text.push(token_ids)
        has_stopped = self.text is not None and self.text.has_stopped
        return torch.tensor([has_stopped or self.answer.has_ended.is_set()], device=input_ids.device)
