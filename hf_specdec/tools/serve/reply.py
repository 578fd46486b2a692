"""OpenAI's objects for the answer to a completion, whole or as the events of a stream. Knows nothing of HTTP."""

import time
import uuid
from typing import Any

from pydantic_core import to_json

from hf_specdec.tools.serve.answer import Answer, Delta
from hf_specdec.tools.serve.protocol import AnyRequest, ChatRequest

CHAT = ("chatcmpl", "chat.completion", "chat.completion.chunk")  # start of ids, names of the whole and of a piece
SECONDS = ("prefill_seconds", "draft_seconds", "verify_seconds", "commit_seconds", "compile_seconds")
OF_THE_BATCH = (*SECONDS, "num_forwards", "num_graphs", "num_replayed", "record_reason")  # counted for no row
TEXT = ("cmpl", "text_completion", "text_completion")


class Reply:
    """The answer to a completion of a chat or a text, in OpenAI's form."""

    def __init__(self, body: AnyRequest, answer: Answer) -> None:
        self.answer, self._is_chat = answer, isinstance(body, ChatRequest)
        self._includes_usage = body.stream_options.get("include_usage", False)
        prefix, *self._kinds = CHAT if self._is_chat else TEXT
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        message = {"role": "assistant", **self.answer.message}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = self._choice("message", message, self.answer.finish_reason)
        return {**self._head, "object": self._kinds[0], "choices": [choice], "usage": self.usage()}

    def first_events(self) -> str:
        """Return the events that open the answer."""
        return self.events({"role": "assistant", "content": ""})

    def events(self, delta: Delta, finish_reason: str | None = None) -> str:
        """Return the events of what is certain now."""
        return self._chunk(choices=[self._choice("delta", delta, finish_reason)])

    def last_events(self) -> str:
        """Return the events that end the answer, and count its tokens where the request wants that."""
        usage = self._chunk(choices=[], usage=self.usage()) if self._includes_usage else ""
        return f"{self.events({}, self.answer.finish_reason)}{usage}data: [DONE]\n\n"

    def error_event(self, error: dict[str, Any]) -> str:
        """Return the event of an error."""
        return sent_event({"error": error})

    def usage(self) -> dict[str, Any]:
        """Return token counts, with OpenAI's names for drafts; `spec_stats` has the rest."""
        stats, num_prompt = self.answer.result.stats, self.answer.prompt_tokens
        num_new = len(self.answer.result.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens, "cache_write_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted_tokens,
                "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
                "reasoning_tokens": self.answer.reasoning_tokens,
            },
            "spec_stats": {name: count for name, count in stats.to_dict().items() if name not in OF_THE_BATCH},
        }

    def _choice(self, name: str, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        content = {key: value for key, value in delta.items() if key != "logprobs"}
        fields = {name: content} if self._is_chat else {"text": delta.get("content", "")}
        logprobs = {"content": delta["logprobs"], "refusal": None} if "logprobs" in delta else None
        return {"index": 0, **fields, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, **fields: Any) -> str:
        return sent_event({**self._head, "object": self._kinds[1], **fields})


def sent_event(document: dict[str, Any], name: str = "") -> str:
    """Return a document as an event that a server sends."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(document, inf_nan_mode='null').decode()}\n\n"
