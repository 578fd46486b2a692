"""Requests in one batch, their tokens sent to an asyncio loop as they are decided. Knows nothing of HTTP."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from hf_specdec import compat
from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.errors import QueueFullError
from hf_specdec.tools.serve.processors import LogprobRecorder, TokenScore


class NewTokens(NamedTuple):
    """Tokens that were decided, and their scores where the request asks for log-probabilities."""

    token_ids: list[int]
    scores: list[TokenScore]


class Answer:
    """The tokens of one request's texts as they are decided, and what became of them.

    Attributes:
        futures (`list[Future[ManyResult]]`): the result of each text, once its tokens have ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._queue = loop, asyncio.Queue[tuple[int, NewTokens | None]]()
        self.futures: list[Future[ManyResult]] = []
        self._ended: set[int] = set()
        self._cancelled = threading.Event()
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float, error: Exception) -> None:
        """Cancel it with an error if it takes longer."""
        self._timer = self._loop.call_later(seconds, self.cancel, error)

    def cancel(self, error: Exception | None = None) -> None:
        """The answer is not wanted any more: its places are free, in the batch after the next token.

        Args:
            error: for who reads the tokens: there will be no more.
        """
        self._error = self._error or error
        self._cancelled.set()
        if self._timer is not None:
            self._timer.cancel()
        for future in self.futures:
            future.cancel()

    def end_text(self, index: int) -> None:
        """End one of the texts after its next token."""
        self._ended.add(index)

    def has_ended(self, index: int) -> bool:
        """True where no client waits for more of a text."""
        return self._cancelled.is_set() or index in self._ended

    @property
    def is_done(self) -> bool:
        """Returns whether all texts have ended."""
        return all(future.done() for future in self.futures)

    @property
    def results(self) -> list[ManyResult]:
        """Results of the texts.

        Raises:
            CancelledError: it was cancelled while it waited.
            Exception: what is wrong with the engine.
        """
        return [self.result(index) for index in range(len(self.futures))]

    def result(self, index: int) -> ManyResult:
        """Result of one text; raises as `results` does."""
        return self.futures[index].result()

    async def __aiter__(self) -> AsyncIterator[tuple[int, NewTokens | None]]:
        """New tokens with the number of their text; `None` at the end of each.

        Raises:
            Exception: what is wrong with this request, or with the engine.
        """
        for _ in range(len(self.futures)):
            while (found := await self._queue.get())[1] is not None:
                yield found
            if self._error is not None:
                raise self._error
            if (error := self.result(found[0]).error) is not None:
                raise error
            yield found

    def send(self, index: int, new: NewTokens | None) -> None:
        """From the engine's thread: new tokens of a text, or `None` at its end."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: no one listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, new))


class _Feed:
    """A stopping criterion: sees every token as it is decided, and ends what no one waits for."""

    row_safe = True

    def __init__(self, answer: Answer, index: int, num_seen: int, recorder: LogprobRecorder | None) -> None:
        self.answer, self.index, self.num_seen, self.recorder = answer, index, num_seen, recorder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        token_ids = input_ids[0, self.num_seen :].tolist()
        places = enumerate(token_ids, self.num_seen)
        found = [] if self.recorder is None else [self.recorder.take(place, token) for place, token in places]
        self.answer.send(self.index, NewTokens(token_ids, found))
        self.num_seen = input_ids.shape[1]
        return torch.tensor([self.answer.has_ended(self.index)], device=input_ids.device)


class _StopStrings:
    """A stopping criterion: ends an answer that holds a stop string, whatever its prompt holds."""

    row_safe = True

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str], prompt_length: int) -> None:
        self._criterion = compat.StopStringCriteria(tokenizer, list(stop_strings))
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        has_ended: torch.Tensor = self._criterion(input_ids[:, self._prompt_length :], scores, **kwargs)
        return has_ended


class ServingEngine:
    """Decodes requests in one batch of at most `max_batch_size`.

    Args:
        max_queue (`int`, *optional*): most requests that wait for a place; by default there is no bound.
        options: arguments of `generate_many` for all requests; a request may have others.

    Attributes:
        is_ending (`bool`): whether no further requests should be submitted.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch_size: int,
        options: Mapping[str, Any],
        max_queue: int | None = None,
    ) -> None:
        arguments = {**options, "max_batch_size": max_batch_size, "tokenizer": tokenizer}
        self._batch = SharedBatch(model, max_queue=max_queue, **arguments)
        self._tokenizer = tokenizer
        self._open: set[Answer] = set()
        self.is_ending = False

    @property
    def is_busy(self) -> bool:
        """Returns whether answers are open."""
        return bool(self._open)

    @property
    def num_running(self) -> int:
        """Texts that are being decoded."""
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a place."""
        return self._batch.num_waiting

    def prepared(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A request with what ends it at its `stop_strings`, which takes longer the more tokens there are."""
        if not (stop_strings := inputs.get("stop_strings")):
            return dict(inputs)
        ending = _StopStrings(self._tokenizer, stop_strings, len(inputs["input_ids"][0]))
        criteria = [*inputs.get("stopping_criteria", ()), ending]
        return {**inputs, "stop_strings": None, "stopping_criteria": criteria}

    def submit(self, texts: Sequence[Mapping[str, Any]], loop: asyncio.AbstractEventLoop) -> Answer:
        """Queue the texts of a request: `generate`'s inputs for one sequence each, prepared.

        Next to these an input may have its `seed`, and `num_logprobs`: how many of the most likely tokens to tell
        beside each token.

        Raises:
            QueueFullError: as many texts wait as may; none of this request does.
        """
        answer = Answer(loop)
        try:
            for index, inputs in enumerate(texts):
                future = self._batch.submit(_fed(inputs, answer, index))
                answer.futures.append(future)
                future.add_done_callback(functools.partial(self._end_text, answer, index))
        except QueueFullError:
            answer.cancel()
            raise
        self._open.add(answer)
        if answer.is_done:
            self._open.discard(answer)
        return answer

    def end_answers(self, error: Exception) -> None:
        """End open answers with an error."""
        for answer in list(self._open):
            answer.cancel(error)

    def close(self) -> None:
        """End all requests and the thread."""
        for answer in list(self._open):
            answer.cancel()
        self._batch.close()

    def _end_text(self, answer: Answer, index: int, future: Future[ManyResult]) -> None:
        if answer.is_done:
            self._open.discard(answer)
        answer.send(index, None)


def _fed(inputs: Mapping[str, Any], answer: Answer, index: int) -> dict[str, Any]:
    """Inputs of one text, whose tokens go to the answer as they are decided."""
    given = dict(inputs)
    num_logprobs = given.pop("num_logprobs", None)
    recorder = None if num_logprobs is None else LogprobRecorder(num_logprobs)
    feed = _Feed(answer, index, given["input_ids"].shape[1], recorder)
    given["stopping_criteria"] = [feed, *given.get("stopping_criteria", ())]
    if recorder is not None:
        given["logits_processor"] = [recorder, *given.get("logits_processor", ())]
    return given
