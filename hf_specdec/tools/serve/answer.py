"""A request in the shared batch, whose tokens become text, reasoning and calls. Knows nothing of HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.tools.serve.calls import ChatParser
from hf_specdec.tools.serve.protocol import ChatRequest, SamplingRequest
from hf_specdec.tools.serve.requests import RequestReader
from hf_specdec.tools.serve.text_stream import INCOMPLETE, TextStream

Delta = dict[str, Any]  # of OpenAI's API, with its log-probabilities under "logprobs"


class Answer:
    """What a model answers, as it is decided; the stopping criterion of its own text.

    Args:
        batch: decodes it.
        inputs: of `generate`, for one sequence.

    Attributes:
        prompt_tokens (`int`): tokens of its prompt.
        message (`dict`): what it holds so far, as a delta.
        finish_reason (`str`): reason of its end, once it has ended.
        first_token_time (`float`): time of its first token.

    Raises:
        QueueFullError: as many texts wait as may.
    """

    row_safe = True

    def __init__(
        self, batch: SharedBatch, reader: RequestReader, body: SamplingRequest, inputs: Mapping[str, Any]
    ) -> None:
        ids, chat = inputs["input_ids"][0].tolist(), body if isinstance(body, ChatRequest) else None
        self._tokenizer, self._ends, form = reader.tokenizer, reader.end_tokens, reader.chat_format
        self._parser = ChatParser() if chat is None else form.parser(ids, chat.offered_tools)
        self._text = TextStream(reader.tokenizer, body.stop, form.skipped(self._parser.fields) | self._ends)
        self._is_single = chat is not None and not chat.parallel_tool_calls
        self._scores = TokenScores(reader.tokenizer, chat.top_logprobs or 0) if chat and chat.logprobs else None
        self.message: Delta = {"content": ""}
        self.finish_reason, self.first_token_time, self.prompt_tokens = "", 0.0, len(ids)
        self._max_length, self._num_seen, self._has_ended = len(ids) + inputs["max_new_tokens"], len(ids), False
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Delta | None]()
        kwargs = {**inputs, "stopping_criteria": [self]}
        if self._scores is not None:
            kwargs["logits_processor"] = [self._scores, *inputs.get("logits_processor", ())]
        self._future: Future[ManyResult] = batch.submit(kwargs)
        self._future.add_done_callback(lambda future: self._send(None))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See `StoppingCriteria`; called in the batch's thread with each token."""
        self.first_token_time = self.first_token_time or time.perf_counter()
        new = input_ids[0, self._num_seen :].tolist()
        delta = self._parser.push(self._text.push(new))
        if self._scores is not None:
            entries = [self._scores.take(place, token) for place, token in enumerate(new, self._num_seen)]
            delta["logprobs"] = [entry for entry, token in zip(entries, new, strict=True) if token not in self._ends]
        self._num_seen += len(new)
        self._send(self._added(delta))
        return torch.tensor([self._has_ended or self._text.has_stopped], device=input_ids.device)

    def cancel(self) -> None:
        """Free its place, in the batch after the next token."""
        self._has_ended = True
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

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its reasoning."""
        return len(self._tokenizer(self.message.get("reasoning_content", ""), add_special_tokens=False)["input_ids"])

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is certain of the answer, until it has ended."""
        while (delta := await self._queue.get()) is not None:
            yield delta
        last_token = self.result.token_ids[-1]
        is_cut = self._num_seen >= self._max_length and last_token not in self._ends and not self._text.has_stopped
        yield self._added(self._parser.push(self._text.push((), is_end=True), is_end=True, is_cut=is_cut))
        self.finish_reason = "length" if is_cut else "tool_calls" if self._parser.num_calls else "stop"

    def _send(self, delta: Delta | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: no one listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)

    def _added(self, delta: Delta) -> Delta:
        """Add a delta to the message; where calls may not be parallel, the first ends the answer."""
        if self._is_single and "tool_calls" in self.message:
            return {}
        if self._is_single and "tool_calls" in delta:
            delta["tool_calls"], self._has_ended = delta["tool_calls"][:1], True
        for name, value in delta.items():
            self.message[name] = self.message[name] + value if name in self.message else value
        return delta


class TokenScores:
    """A logits processor that keeps log-probabilities until a token is chosen; it changes nothing.

    Args:
        num_top (`int`): most likely tokens to describe beside each token.
    """

    row_safe = True

    def __init__(self, tokenizer: Any, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._rows: dict[int, torch.Tensor] = {}  # (vocab_size,) by the number of tokens before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep the row after `(1, length)` ids; return the scores, `(1, vocab_size)`, as they are."""
        self._rows[input_ids.shape[1]] = scores[0].log_softmax(dim=-1)
        return scores

    def take(self, place: int, token: int) -> dict[str, Any]:
        """Describe the token that was chosen after `place` tokens as OpenAI's API does."""
        row = self._rows.pop(place)
        return {
            **self._entry(row, token),
            "top_logprobs": [self._entry(row, top) for top in row.topk(self._num_top)[1]],
        }

    def _entry(self, row: torch.Tensor, token: Any) -> dict[str, Any]:
        """A token with its bytes, which are unknown where it is a part of a character."""
        text = str(self._tokenizer.decode([int(token)]))
        return {"token": text, "logprob": float(row[token]), "bytes": None if INCOMPLETE in text else [*text.encode()]}
