"""One thread that decodes all requests in one batch; requests come and go while it runs. Knows nothing of HTTP.

engine = ServingEngine(model, tokenizer, max_batch_size=8, options={"spec_method": "auto"})
answer = engine.submit({"input_ids": ids, "max_new_tokens": 64}, loop)
async for token_ids in answer:
    ...
answer.result, answer.cancel()
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import torch

from hf_specdec.errors import SpecError
from hf_specdec.many_prompts import NOT_YET, ManyResult, generate_many

__all__ = ["Answer", "ServingEngine"]


class Answer:
    """The tokens of one request as they are decided, and what became of it.

    Attributes:
        result (`ManyResult | None`): there once the tokens have ended.
    """

    def __init__(self, inputs: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.prompt = _Prompt(self, inputs)
        self.result: ManyResult | None = None
        self.failure: BaseException | None = None
        self._loop, self._queue = loop, asyncio.Queue[list[int] | None]()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """The answer is not wanted any more: its place in the batch is free after the next token."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it."""
        return self._cancelled.is_set()

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        """New tokens; ends where the text ends.

        Raises:
            Exception: what is wrong with this request, or with the engine.
        """
        while (token_ids := await self._queue.get()) is not None:
            yield token_ids
        error = self.failure if self.result is None else self.result.error
        if error is not None:
            raise error

    def send(self, token_ids: list[int] | None) -> None:
        """From the engine's thread: new tokens, or `None` at the end."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, token_ids)


class _Prompt(dict[str, Any]):
    """`generate`'s inputs of one request, with the answer that they belong to."""

    def __init__(self, answer: Answer, inputs: Mapping[str, Any]) -> None:
        criteria = [*inputs.get("stopping_criteria", ()), _Feed(answer, len(inputs["input_ids"][0]))]
        super().__init__({**inputs, "stopping_criteria": criteria})
        self.answer = answer


class _Feed:
    """A stopping criterion: sees every token as it is decided, and ends what nobody waits for."""

    row_safe = True

    def __init__(self, answer: Answer, num_seen: int) -> None:
        self.answer, self.num_seen = answer, num_seen

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.answer.send(input_ids[0, self.num_seen :].tolist())
        self.num_seen = input_ids.shape[1]
        return torch.tensor([self.answer.is_cancelled], device=input_ids.device)


class ServingEngine:
    """Decodes requests in one batch of at most `max_batch_size`.

    Args:
        options: arguments of `generate_many` for all requests; a request may have others.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_batch_size: int, options: Mapping[str, Any]) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._options = {**options, "max_batch_size": max_batch_size, "tokenizer": tokenizer}
        self._waiting: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._open: set[Answer] = set()  # of the engine's thread
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="hf-specdec-engine", daemon=True)
        self._thread.start()

    def submit(self, inputs: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Answer:
        """Queue a request: `generate`'s inputs for one sequence, with its `seed` if it has one."""
        answer = Answer(inputs, loop)
        self._waiting.put(answer)
        return answer

    def close(self) -> None:
        """End all requests and the thread."""
        self._is_closing = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closing:
            answer = self._waiting.get()
            if answer is None:
                continue
            try:
                for result in generate_many(self.model, self._prompts(answer), **self._options):
                    self._end(result.prompt.answer, result)
            except Exception as error:  # noqa: BLE001 - each open request raises it where it is waited for
                self._fail(error)
        self._fail(SpecError("the server is shutting down"))

    def _prompts(self, first: Answer) -> Iterator[Any]:
        """The first request, then those that are waiting whenever the batch has room."""
        answer: Answer | None = first
        while not self._is_closing:
            if answer is None:
                yield NOT_YET
            elif answer.is_cancelled:
                answer.send(None)
            else:
                self._open.add(answer)
                yield answer.prompt
            try:
                answer = self._waiting.get_nowait()
            except queue.Empty:
                answer = None
        for open_answer in self._open:
            open_answer.cancel()

    def _end(self, answer: Answer, result: ManyResult) -> None:
        self._open.discard(answer)
        answer.result = result
        answer.send(None)

    def _fail(self, error: BaseException) -> None:
        for answer in self._open:
            answer.failure = error
            answer.send(None)
        self._open.clear()
