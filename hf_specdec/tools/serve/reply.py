"""OpenAI's objects for the answer to a request, whole or as the events of a stream. Knows nothing of HTTP."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.tools.serve.calls import ChatParser
from hf_specdec.tools.serve.engine import NewTokens, TokenScore
from hf_specdec.tools.serve.protocol import ChatRequest, CompletionBody, SamplingRequest
from hf_specdec.tools.serve.requests import RequestReader
from hf_specdec.tools.serve.text_stream import INCOMPLETE, TextStream

Delta = dict[str, Any]  # of OpenAI's API, with its log-probabilities under "logprobs"


class _TextChoice(CompletionChoice):
    finish_reason: str | None  # type: ignore[assignment]  # none yet, in a stream


class _TextCompletion(Completion):
    choices: list[_TextChoice]  # type: ignore[assignment]


class AnswerText:
    """Text, reasoning and calls of an answer, from its tokens.

    Args:
        max_new_tokens (`int`): most tokens that it may have.

    Attributes:
        message (`dict`): what it holds so far, as a delta.
        is_complete (`bool`): whether it has a call and may have no other.
        finish_reason (`str`): reason of its end, once it has ended.
    """

    def __init__(
        self, reader: RequestReader, body: SamplingRequest, prompt_ids: Sequence[int], max_new_tokens: int
    ) -> None:
        chat = body if isinstance(body, ChatRequest) else None
        self.parser = ChatParser() if chat is None else reader.chat_format.parser(prompt_ids, chat.offered_tools)
        skipped = None if self.parser.skipped is None else self.parser.skipped | reader.end_tokens
        self.text = TextStream(reader.tokenizer, body.stop, skipped)
        self.message: Delta = {"content": ""}
        self.is_complete = False
        self.finish_reason = ""
        self._is_single = chat is not None and not chat.parallel_tool_calls
        self._reader, self._max_new_tokens = reader, max_new_tokens

    def push(self, new: NewTokens) -> Delta:
        """Take new tokens; return what is certain now."""
        scores = [self._described(score) for score in new.scores if score.token not in self._reader.end_tokens]
        return self._add(self.parser.push(self.text.push(new.token_ids)) | ({"logprobs": scores} if scores else {}))

    def end(self, token_ids: list[int]) -> Delta:
        """Take the end; return the rest as `push` does."""
        is_cut = len(token_ids) >= self._max_new_tokens and token_ids[-1] not in self._reader.end_tokens
        is_cut = is_cut and not self.text.has_stopped
        delta = self._add(self.parser.push(self.text.end(), is_end=True, is_cut=is_cut))
        self.finish_reason = "length" if is_cut else "tool_calls" if self.parser.num_calls else "stop"
        return delta

    def _add(self, delta: Delta) -> Delta:
        if self.is_complete:
            return {}
        if self._is_single and "tool_calls" in delta:
            delta["tool_calls"], self.is_complete = delta["tool_calls"][:1], True
        for name, value in delta.items():
            self.message[name] = self.message[name] + value if name in self.message else value
        return delta

    def _described(self, score: TokenScore) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its bytes, which are unknown where it is a part of a character."""
        text = str(self._reader.tokenizer.decode([token]))
        return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}


class Reply:
    """The answer to a completion of a chat or a text.

    Args:
        body: the request.
        answer: its text.
        prompt_tokens (`int`): tokens of its prompt.
    """

    def __init__(self, body: CompletionBody, answer: AnswerText, prompt_tokens: int) -> None:
        self.answer, self.prompt_tokens, self.is_chat = answer, prompt_tokens, isinstance(body, ChatRequest)
        self._includes_usage = body.stream_options.include_usage
        self._has_logprobs = isinstance(body, ChatRequest) and body.logprobs
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def whole(self, result: ManyResult) -> BaseModel:
        """Return the answer in one piece."""
        message = {"role": "assistant", **self.answer.message}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = self._choice("message", message, self.answer.finish_reason)
        document = {**self._head, "choices": [choice], "usage": self.usage(result)}
        if self.is_chat:
            return ChatCompletion.model_validate({"object": "chat.completion", **document})
        return _TextCompletion.model_validate({"object": "text_completion", **document})

    def first_events(self) -> str:
        """Return the events that open the answer."""
        return self.event({"role": "assistant", "content": ""})

    def event(self, delta: Delta, finish_reason: str | None = None) -> str:
        """Return the event of what is certain now."""
        return self._chunk([self._choice("delta", delta, finish_reason)])

    def last_events(self, result: ManyResult) -> str:
        """Return the events that end the answer, and count its tokens where the request wants that."""
        ending = self.event({}, self.answer.finish_reason)
        if self._includes_usage:
            ending += self._chunk([], usage=self.usage(result))
        return f"{ending}data: [DONE]\n\n"

    def error_event(self, described: dict[str, Any]) -> str:
        """Return the event of an error."""
        return f"data: {json.dumps({'error': described})}\n\n"

    def _choice(self, name: str, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        content = {key: value for key, value in delta.items() if key != "logprobs"}
        fields = {name: content} if self.is_chat else {"text": delta.get("content", "")}
        logprobs = {"content": delta.get("logprobs", []), "refusal": None} if self._has_logprobs else None
        return {"index": 0, **fields, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]], **usage: Any) -> str:
        document = {**self._head, "choices": choices, **usage}
        if self.is_chat:
            return _event(ChatCompletionChunk.model_validate({"object": "chat.completion.chunk", **document}))
        return _event(_TextCompletion.model_validate({"object": "text_completion", **document}))

    def usage(self, result: ManyResult) -> dict[str, Any]:
        """Return token counts, with OpenAI's names for drafts; `spec_stats` has the rest."""
        stats, num_new = result.stats, len(result.token_ids)
        reasoning = self.answer.text.num_tokens(self.answer.message.get("reasoning_content", ""))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.prompt_tokens + num_new,
            "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted_tokens,
                "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
                "reasoning_tokens": reasoning,
            },
            "spec_stats": stats.to_dict(),
        }


def _event(document: BaseModel) -> str:
    return f"data: {document.model_dump_json(exclude_unset=True)}\n\n"
