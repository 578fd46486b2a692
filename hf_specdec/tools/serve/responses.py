"""The Responses endpoint on top of chats: its requests as those of a chat, its objects for the answers."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.answer import Answer, Delta
from hf_specdec.tools.serve.protocol import ChatRequest, SamplingRequest
from hf_specdec.tools.serve.reply import Reply, sent_event

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of items' ids
PARTS: dict[str, dict[str, Any]] = {  # of an item's text
    "reasoning": {"type": "reasoning_text"},
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
}


class ResponsesRequest(SamplingRequest):
    """The body of `/v1/responses`. Messages, tools and formats are checked as those of a chat."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    text: dict[Literal["format"], dict[str, Any]] = Field({})
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["reasoning.encrypted_content"]] = Field([])  # a reasoning item has its text
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = Field({})

    def as_chat(self) -> ChatRequest:
        """Return the request as one of a chat."""
        names = {*SamplingRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs"}
        chat = self.model_dump(include=names, exclude_unset=True) | {"messages": self._messages()}
        form = {name: value for name, value in self.text.get("format", {"type": "text"}).items() if value is not None}
        chat["response_format"] = {"type": form.pop("type", None), **({"json_schema": form} if form else {})}
        chat["tools"] = [_nested(tool) for tool in self.tools]
        chat["tool_choice"] = _nested(self.tool_choice) if isinstance(self.tool_choice, dict) else self.tool_choice
        return ChatRequest.model_validate(chat)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the items as messages; reasoning, text and calls of one answer are one."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            match {"type": "message", **item}:
                case {"type": "message", "role": "assistant", "content": content} if last and not last["content"]:
                    last["content"] = content
                case {"type": "message", "role": role, "content": content}:
                    messages.append({"role": role, "content": content})
                case {"type": "reasoning"}:
                    parts = item.get("content") or []
                    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
                    messages.append({"role": "assistant", "content": "", "reasoning_content": text})
                case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                    if last is None:
                        messages.append(last := {"role": "assistant", "content": ""})
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    last.setdefault("tool_calls", []).append(call)
                case {"type": "function_call_output", "call_id": call_id, "output": output}:
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
                case _:
                    rule = f"must be a whole {', '.join(PREFIXES)} or function_call_output"
                    raise ConfigError(f"input.{number}", rule, item, "The server keeps no items of earlier responses.")
        return messages


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A function, or the choice of one, as chats have it."""
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


class ResponsesReply(Reply):
    """The response to one request, of items that follow one another: reasoning, a message, calls."""

    def __init__(self, request: ResponsesRequest, body: ChatRequest, answer: Answer) -> None:
        super().__init__(body, answer)
        self._output: list[dict[str, Any]] = []  # the last item is open
        self._response = {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            **request.model_dump(exclude_unset=True, exclude={"input", "stream", "include", "max_tokens"}),
            "tools": [{"parameters": None, "strict": None, **tool} for tool in request.tools],
            "max_output_tokens": request.max_tokens,
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "store": False,
            "output": self._output,
        }
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        """Return the response in one piece."""
        self.events(self.answer.message)
        self.last_events()
        return self._response

    def first_events(self) -> str:
        """Return the events that open the response."""
        return self._event("response.created", response=self._response)

    def events(self, delta: Delta, finish_reason: str | None = None) -> str:
        """Return the events of what is certain now."""
        texts = {"reasoning": delta.get("reasoning_content"), "message": delta.get("content")}
        events = [event for kind, text in texts.items() if text for event in self._text_events(kind, text)]
        for call in delta.get("tool_calls", ()):
            events += self._begin_item("function_call", {"call_id": call["id"], **call["function"], "arguments": ""})
            self._output[-1]["arguments"] = arguments = call["function"]["arguments"]
            events.append(self._item_event("response.function_call_arguments.delta", delta=arguments))
        return "".join(events)

    def last_events(self) -> str:
        """Return the events that end the response."""
        is_cut = self.answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        ending = "".join(self._end_item(status))
        self._response |= {"status": status, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}
        counts = self.usage().items()
        usage = {name.replace("prompt_", "input_").replace("completion_", "output_"): count for name, count in counts}
        self._response["usage"] = usage
        return ending + self._event(f"response.{status}", response=self._response)

    def error_event(self, error: dict[str, Any]) -> str:
        """Return the event of an error."""
        return self._event("error", error=error, **{name: error[name] for name in ("code", "message", "param")})

    def _text_events(self, kind: str, text: str) -> Iterator[str]:
        if not self._output or self._output[-1]["type"] != kind:
            fields: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._begin_item(kind, {**fields, "content": []})
        part = self._output[-1]["content"][0]
        part["text"] += text
        yield self._item_event(f"response.{part['type']}.delta", content_index=0, delta=text, logprobs=[])

    def _begin_item(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """End the item that is open and begin another, with an empty part of text where it has parts."""
        yield from self._end_item("completed")
        item = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield self._item_event("response.output_item.added", item=item)
        if kind in PARTS:
            item["content"].append({**PARTS[kind], "text": ""})
            yield self._item_event("response.content_part.added", content_index=0, part=item["content"][0])

    def _end_item(self, status: str) -> Iterator[str]:
        """End the item that is open, if there is any."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] in PARTS:
            part = item["content"][0]
            yield self._item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], logprobs=[])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            fields = {name: item[name] for name in ("name", "arguments")}
            yield self._item_event("response.function_call_arguments.done", **fields)
        yield self._item_event("response.output_item.done", item=item)

    def _item_event(self, event: str, **fields: Any) -> str:
        """Return an event of the item that is open."""
        return self._event(event, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, event: str, **fields: Any) -> str:
        self._num_events += 1
        return sent_event({"type": event, "sequence_number": self._num_events - 1, **fields}, event)
