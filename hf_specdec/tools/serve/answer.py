"""From the tokens of a request in the shared batch to text, reasoning and calls. Knows nothing of HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hf_specdec.api.many_prompts.job import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.tools.serve.calls import CALL, END_OF_CALL, ChatParser
from hf_specdec.tools.serve.protocol import AnyRequest, ChatRequest
from hf_specdec.tools.serve.requests import RequestReader

Delta = dict[str, Any]  # of OpenAI's API, with its log-probabilities under "logprobs"
INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class Answer:
    """The growing answer to one request; also the stopping criterion of its text."""

    row_safe = True

    def __init__(self, batch: SharedBatch, reader: RequestReader, body: AnyRequest, inputs: dict[str, Any]) -> None:
        ids, chat = inputs["input_ids"][0].tolist(), body if isinstance(body, ChatRequest) else None
        self._tokenizer, self._ends, form = reader.tokenizer, reader.end_tokens, reader.chat_format
        self._parser = ChatParser() if chat is None else form.parser(ids, chat.offered_tools)
        self._text = TextStream(reader.tokenizer, body.stop, form.skipped(self._parser.fields) | self._ends)
        self._is_forced = chat is not None and bool(chat.forced_tools)
        self._parser.push(f"{CALL}\n" if self._is_forced else "")  # the prompt ends with it
        self._is_single = chat is not None and not chat.parallel_tool_calls
        has_scores = chat is not None and (chat.logprobs or chat.top_logprobs is not None)
        self._scores = TokenScores(reader.tokenizer, chat.top_logprobs or 0) if chat and has_scores else None
        self.message: Delta = {"content": ""}  # all that is certain so far
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
        """Its result, once it has ended; raises what is wrong with this request, or with the batch."""
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
        text = self._text.push((), is_end=True) + (END_OF_CALL if self._is_forced and not is_cut else "")
        yield self._added(self._parser.push(text, is_end=True, is_cut=is_cut))
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
    """A logits processor that keeps log-probabilities until a token is chosen; it changes nothing."""

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
        top = row.topk(self._num_top)[1]
        return {**self._entry(row, token), "top_logprobs": [self._entry(row, token) for token in top]}

    def _entry(self, row: torch.Tensor, token: Any) -> dict[str, Any]:
        """A token with its bytes, which are unknown where it is a part of a character."""
        text = str(self._tokenizer.decode([int(token)]))
        return {"token": text, "logprob": float(row[token]), "bytes": None if INCOMPLETE in text else [*text.encode()]}


class TextStream:
    """The text of one answer, up to its first stop string and without the tokens that are skipped."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skipped: Collection[int] = ()) -> None:
        self._tokenizer, self._stop, self._skipped = tokenizer, [text for text in stop if text], skipped
        self._token_ids: list[int] = []
        self._context = self._decoded = 0  # tokens before those that the last piece was decoded after, and before it
        self._held = ""
        self.has_stopped = False

    def push(self, token_ids: Sequence[int], *, is_end: bool = False) -> str:
        """Take new tokens, the last of them at the end; return the text that is certain now."""
        self._token_ids.extend(token for token in token_ids if token not in self._skipped)
        if self.has_stopped:
            return ""
        self._held += self._new_text(is_end)
        places = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        self.has_stopped = bool(places)
        overlaps = [0] if is_end else [_overlap(self._held, stop) for stop in self._stop]
        cut = min(places, default=len(self._held) - max(overlaps, default=0))
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _new_text(self, is_end: bool) -> str:
        """Decode with the tokens before, on which spaces and joined bytes depend."""
        before = str(self._tokenizer.decode(self._token_ids[self._context : self._decoded]))
        text = str(self._tokenizer.decode(self._token_ids[self._context :]))
        if not is_end and (len(text) <= len(before) or text.endswith(INCOMPLETE)):
            return ""
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string may begin with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
