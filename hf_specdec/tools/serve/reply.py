"""OpenAI's objects for the answers to one request, whole or as the events of a stream. Knows nothing of HTTP."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.tools.serve.chat_parser import ChatParser
from hf_specdec.tools.serve.engine import NewTokens
from hf_specdec.tools.serve.processors import TokenScore
from hf_specdec.tools.serve.protocol import ChatRequest, GenerationRequest
from hf_specdec.tools.serve.text_stream import INCOMPLETE, TextStream

Delta = dict[str, Any]


class Choice:
    """One text of an answer.

    Args:
        index (`int`): its number.
        text: makes text of its tokens.
        parser: splits off reasoning and tool calls.
        decode: gives the text of one token.
        end_tokens: tokens that end an answer and are no part of it.
        max_new_tokens (`int`): most tokens that it may have.

    Attributes:
        message (`dict`): what it holds so far.
        finish_reason (`str`): reason of its end, once it has ended.
        logprobs (`list[dict]`): of its tokens so far, as chats have them.
    """

    def __init__(
        self,
        index: int,
        text: TextStream,
        parser: ChatParser,
        decode: Callable[[int], str],
        end_tokens: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self.index, self.text, self.parser = index, text, parser
        self.message: Delta = {"content": ""}
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason = ""
        self._decode, self._end_tokens, self._max_new_tokens = decode, end_tokens, max_new_tokens
        self._held: list[tuple[int, TokenScore]] = []  # scores of text that is not certain, with where it begins
        self._num_read = self._num_scored = 0  # characters

    def push(self, new: NewTokens) -> tuple[Delta, list[dict[str, Any]]]:
        """Take new tokens; returns what is certain now, and the log-probabilities of that."""
        for score in new.scores:
            if score.token not in self._end_tokens:
                self._held.append((self._num_scored, score))
                self._num_scored += len(self._decode(score.token))
        piece = self.text.push(new.token_ids)
        return self._add(self.parser.push(piece), len(piece))

    def end(self, result: ManyResult) -> tuple[Delta, list[dict[str, Any]]]:
        """Take the end; returns the rest as `push` does."""
        piece, token_ids = self.text.end(), result.token_ids
        is_cut = len(token_ids) >= self._max_new_tokens and token_ids[-1] not in self._end_tokens
        is_cut = is_cut and not self.text.has_stopped
        found = self._add(self.parser.push(piece, is_end=True, is_cut=is_cut), len(piece), is_end=True)
        self.finish_reason = "length" if is_cut else "tool_calls" if self.parser.num_calls else "stop"
        return found

    def _add(self, delta: Delta, length: int, *, is_end: bool = False) -> tuple[Delta, list[dict[str, Any]]]:
        """Add a delta to the message; returns it with the log-probabilities of its `length` characters."""
        self._num_read += length
        is_whole = is_end and not self.text.has_stopped
        scores = [self._described(score) for place, score in self._held if is_whole or place < self._num_read]
        del self._held[: len(scores)]
        self.logprobs += scores
        for name, value in delta.items():
            if name != "tool_calls":
                self.message[name] = self.message.get(name, "") + value
        for call in delta.get("tool_calls", ()):
            calls, function = self.message.setdefault("tool_calls", []), call["function"]
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": {**function, "arguments": ""}})
            calls[-1]["function"]["arguments"] += function["arguments"]
        return delta, scores

    def _described(self, score: TokenScore) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its bytes, which are unknown where it is a part of a character."""
        text = self._decode(token)
        return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}


class Reply:
    """The answers to one request, as completions of chats or texts.

    Args:
        body: the request.
        choices: its texts.
        prompt_tokens (`int`): tokens of its prompt.
    """

    def __init__(self, body: GenerationRequest, choices: Sequence[Choice], prompt_tokens: int) -> None:
        self.choices, self.prompt_tokens, self.is_chat = choices, prompt_tokens, isinstance(body, ChatRequest)
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._has_logprobs = body.num_logprobs is not None
        self._kind = "chat.completion" if self.is_chat else "text_completion"
        self._num_told = [0] * len(choices)  # characters of text completions, of which log-probabilities were told
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def whole(self, results: Sequence[ManyResult]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for choice in self.choices:
            message = choice.message
            if "tool_calls" in message:
                message = {**message, "content": message["content"] or None}
            content = {"message": {"role": "assistant", **message}} if self.is_chat else {"text": message["content"]}
            choices.append(self._choice(choice.index, content, choice.logprobs, choice.finish_reason))
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage(results)}

    def first_events(self) -> str:
        """The events that open the texts."""
        opened = {"role": "assistant", "content": ""} if self.is_chat else {"content": ""}
        return "".join(self._event_of(choice.index, opened) for choice in self.choices)

    def event(self, index: int, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> str:
        """The event of what is certain now of a text."""
        return self._event_of(index, delta, logprobs)

    def last_event(self, index: int) -> str:
        """The event that ends a text."""
        return self._event_of(index, {}, finish=self.choices[index].finish_reason)

    def last_events(self, results: Sequence[ManyResult]) -> str:
        """The events after all texts, which count tokens where that is asked for."""
        return (self._event([], self.usage(results)) if self._includes_usage else "") + "data: [DONE]\n\n"

    def error_event(self, described: dict[str, Any]) -> str:
        """The event of an error."""
        return f"data: {json.dumps({'error': described})}\n\n"

    def _event_of(
        self, index: int, delta: Delta, logprobs: Sequence[dict[str, Any]] = (), *, finish: str | None = None
    ) -> str:
        content: Delta = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self._event([self._choice(index, content, logprobs if finish is None else None, finish)], None)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        kind = f"{self._kind}.chunk" if self.is_chat else self._kind
        document = {**self._head, "object": kind, "choices": choices, **({"usage": usage} if usage else {})}
        return f"data: {json.dumps(document)}\n\n"

    def _choice(
        self, index: int, content: Delta, logprobs: Sequence[dict[str, Any]] | None, finish: str | None
    ) -> dict[str, Any]:
        told: dict[str, Any] | None = None
        if logprobs is not None and self._has_logprobs:
            told = {"content": logprobs, "refusal": None} if self.is_chat else self._columns(index, logprobs)
        return {"index": index, **content, "logprobs": told, "finish_reason": finish}

    def _columns(self, index: int, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Log-probabilities as text completions have them."""
        offsets = []
        for one in logprobs:
            offsets.append(self._num_told[index])
            self._num_told[index] += len(one["token"])
        return {
            "tokens": [one["token"] for one in logprobs],
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in logprobs],
            "text_offset": offsets,
        }

    def usage(self, results: Sequence[ManyResult]) -> dict[str, Any]:
        """Token counts, with OpenAI's names for drafts; `spec_stats` has the rest."""
        all_stats, new = [result.stats for result in results], sum(len(result.token_ids) for result in results)
        stats = all_stats[0]
        num_drafts, drafted, accepted = (
            sum(getattr(one, name) for one in all_stats)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        reasoning = sum(one.text.num_tokens(one.message.get("reasoning_content", "")) for one in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": reasoning,
            },
            "spec_stats": {
                "method": stats.method,
                "num_drafts": num_drafts,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "mean_acceptance_length": 1.0 + (accepted / num_drafts if num_drafts else 0.0),
                "plain_reason": stats.plain_reason,
                "plan": None if stats.plan is None else stats.plan.to_dict(),
            },
        }
