"""Requests in one batch, their tokens sent to an asyncio loop as they are decided. Knows nothing of HTTP."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch


class Answer:
    """The tokens of one request as they are decided, and what became of it.

    Attributes:
        future (`Future[ManyResult]`): the result, once the tokens have ended.
    """

    future: Future[ManyResult]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._queue = loop, asyncio.Queue[list[int] | None]()
        self._cancelled = threading.Event()
        self._error: Exception | None = None

    def cancel(self, error: Exception | None = None) -> None:
        """The answer is not wanted any more: its place is free, in the batch after the next token.

        Args:
            error: for who reads the tokens: there will be no more.
        """
        self._error = self._error or error
        self._cancelled.set()
        self.future.cancel()

    @property
    def is_cancelled(self) -> bool:
        """True where no client waits for it."""
        return self._cancelled.is_set()

    @property
    def result(self) -> ManyResult:
        """Result of the request.

        Raises:
            CancelledError: it was cancelled while it waited.
            Exception: what is wrong with the engine.
        """
        return self.future.result()

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        """New tokens; ends where the text ends.

        Raises:
            Exception: what is wrong with this request, or with the engine.
        """
        while (token_ids := await self._queue.get()) is not None:
            yield token_ids
        if self._error is not None:
            raise self._error
        if (error := self.result.error) is not None:
            raise error

    def send(self, token_ids: list[int] | None) -> None:
        """From the engine's thread: new tokens, or `None` at the end."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: no one listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, token_ids)


class _Feed:
    """A stopping criterion: sees every token as it is decided, and ends what no one waits for."""

    row_safe = True

    def __init__(self, answer: Answer, num_seen: int) -> None:
        self.answer, self.num_seen = answer, num_seen

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.answer.send(input_ids[0, self.num_seen :].tolist())
        self.num_seen = input_ids.shape[1]
        return torch.tensor([self.answer.is_cancelled], device=input_ids.device)


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

    def prepared(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A request with what ends it at its `stop_strings`, which takes longer the more tokens there are."""
        if not (stop_strings := inputs.get("stop_strings")):
            return dict(inputs)
        ending = _StopStrings(self._tokenizer, stop_strings, len(inputs["input_ids"][0]))
        criteria = [*inputs.get("stopping_criteria", ()), ending]
        return {**inputs, "stop_strings": None, "stopping_criteria": criteria}

    def submit(self, inputs: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Answer:
        """Queue a request: `generate`'s inputs for one sequence, prepared, with its `seed` if it has one.

        Raises:
            QueueFullError: as many requests wait as may.
        """
        answer, length = Answer(loop), len(inputs["input_ids"][0])
        criteria = [_Feed(answer, length), *inputs.get("stopping_criteria", ())]
        answer.future = self._batch.submit({**inputs, "stopping_criteria": criteria})
        self._open.add(answer)
        answer.future.add_done_callback(lambda future: self._end(answer))
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

    def _end(self, answer: Answer) -> None:
        self._open.discard(answer)
        answer.send(None)
