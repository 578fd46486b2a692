"""One thread that decodes all prompts it is given in one batch; prompts come and go while it runs.

batch = SharedBatch(model, tokenizer=tokenizer, max_new_tokens=64)
future = batch.submit("def main():")
future.result().text
batch.close()
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from hf_specdec.api.many_prompts.generate_many import generate_many
from hf_specdec.api.many_prompts.job import NOT_YET, ManyResult
from hf_specdec.cache.prefix_cache import PrefixCache
from hf_specdec.errors import QueueFullError, SpecError, without_frames
from hf_specdec.methods.common.config import check_positive

END = object()  # in the queue: look whether the batch is closing
CLOSED = "the batch is closed"


class SharedBatch:
    """A batch that several callers fill. Safe to use from several threads. Knows nothing of HTTP or clusters.

    Args:
        model: a transformers model; it is enabled if it is not.
        max_queue (`int`, *optional*): most prompts that wait for a place; by default there is no bound.
        options: arguments of `generate_many`, `tokenizer` and `max_batch_size` among them; without a `prefix_cache` the
            batch has one.
    """

    def __init__(self, model: Any, *, max_queue: int | None = None, **options: Any) -> None:
        if max_queue is not None:
            check_positive("max_queue", max_queue, "Leave it out for no bound.")
        self.model, self.max_queue = model, max_queue
        criteria = [_Closing(self), *options.get("stopping_criteria", ())]
        self._options = {"prefix_cache": PrefixCache(), **options, "stopping_criteria": criteria}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: set[Future[ManyResult]] = set()
        self._running: dict[int, Future[ManyResult]] = {}  # of the thread, by number in the call of generate_many
        self.is_closing = False
        self._lock = threading.Lock()  # nothing is queued after the batch has begun to close
        self._thread = threading.Thread(target=self._run, name="hf-specdec-batch", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Prompts that are being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for a place."""
        return len(self._waiting)

    def submit(self, prompt: Any) -> Future[ManyResult]:
        """Queue a prompt, in any form that `generate_many` takes.

        Returns:
            The result's future. It raises what stopped the whole batch; what is wrong with this prompt alone is the
            result's `error`. Cancelling works while the prompt waits. A prompt with `stopping_criteria` of its own
            ends by them alone.

        Raises:
            QueueFullError: `max_queue` prompts wait.
            SpecError: the batch is closed.
        """
        with self._lock:
            if self.is_closing:
                raise SpecError(CLOSED)
            if self.max_queue is not None and len(self._waiting) >= self.max_queue:
                raise QueueFullError(self.max_queue)
            future = Future[ManyResult]()
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
            self._queue.put((prompt, future))
        return future

    def close(self) -> None:
        """End what is being decoded after its next token, fail it and what waits, and end the thread."""
        with self._lock:
            self.is_closing = True
        self._queue.put(END)
        self._thread.join()
        self._options.clear()  # its criterion refers to the batch, and would keep the texts of its cache

    def _run(self) -> None:
        while not self.is_closing:
            first = self._queue.get()
            try:
                for result in generate_many(self.model, self._prompts(first), **self._options):
                    if not self.is_closing:
                        self._running.pop(result.index).set_result(result)
            except BaseException as error:  # noqa: BLE001 - whoever waits for one of these prompts raises it
                if not isinstance(error, Exception):  # it would end the threads that wait
                    ending, error = error, SpecError(f"{type(error).__name__} ended the batch")
                    error.__cause__ = ending
                error = without_frames(error)
                unread = [first[1]] if first is not END and first[1] in self._waiting else []
                self._fail([*self._running.values(), *unread], error)
                self._running.clear()
        self._fail([*self._running.values(), *self._waiting], SpecError(CLOSED))

    def _prompts(self, first: Any) -> Iterator[Any]:
        """The first prompt, then those that wait whenever the batch has room."""
        number, item = 0, first
        while not self.is_closing:
            if item is None:
                yield NOT_YET
                number += 1
            elif item is not END and item[1].set_running_or_notify_cancel():
                prompt, future = item
                self._waiting.discard(future)
                self._running[number] = future
                yield prompt
                number += 1
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                item = None

    @staticmethod
    def _fail(futures: Iterable[Future[ManyResult]], error: BaseException) -> None:
        for future in list(futures):
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)


class _Closing:
    """A stopping criterion: ends every text when the batch closes."""

    row_safe = True

    def __init__(self, batch: SharedBatch) -> None:
        self.batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.batch.is_closing, device=input_ids.device)
