"""The Responses endpoint on top of chats: its requests as those of a chat, its objects for the answers.

It keeps no responses: a client sends the items of earlier ones in `input`.
"""

import copy
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.tools.serve.protocol import (
    MAX_LOGPROBS,
    Body,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    SamplingRequest,
)
from hf_specdec.tools.serve.reply import Choice, Delta, Reply

# Fields under the names that chats have for them.
NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
LOGPROBS = "message.output_text.logprobs"
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of items' ids
# The part of each kind of item that has one, without its text.
PARTS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "reasoning_text"},
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
}


class Text(Body):
    """A piece of an item's text."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] = Field([])
    logprobs: list[Any] = Field([])


class Item(Body):
    """Fields that all items have; of an earlier response, `id` and `status` tell nothing new."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text]
    phase: str | None = None


class FunctionCallItem(Item, CalledFunction):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str


class FunctionOutputItem(Item):
    """The answer of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]


class ReasoningItem(Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[Text] = Field([])
    content: list[Text] = Field([])
    encrypted_content: str | None = None


def _kind(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", ""))


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="type must be message, function_call, function_call_output or reasoning",
    ),
]


class TextFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of an answer's text."""

    format: TextFormat | None = None


class OfFunction(Body):
    """Base of what is of the only type of tools."""

    type: Literal["function"]


class FunctionTool(Function, OfFunction):
    """A function that the model may call."""


class FunctionChoice(FunctionName, OfFunction):
    """The function that an answer has to call."""


class ResponsesRequest(SamplingRequest):
    """The body of `/v1/responses`."""

    input: str | list[AnyItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    @field_validator("previous_response_id")
    @classmethod
    def _is_unset(cls, value: str | None) -> None:
        """Refuse what would need an earlier response."""
        raise ValueError("must be unset, as the server keeps no responses; send the items of earlier ones in input")

    def as_chat(self) -> ChatRequest:
        """The request as one of a chat."""
        found = self.model_dump(include=set(SamplingRequest.model_fields), exclude_unset=True)
        if self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_unset=True)
            found["response_format"] = {"type": form.pop("type"), "json_schema": form or None}
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools]
        return ChatRequest.model_validate(
            {
                **found,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "tools": [{"type": "function", "function": tool} for tool in tools],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "logprobs": LOGPROBS in self.include or self.top_logprobs is not None,
                "top_logprobs": self.top_logprobs,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages; reasoning, text and calls of one answer are one."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, FunctionOutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
                continue
            if isinstance(item, MessageItem) and item.role != "assistant":
                found.append({"role": item.role, "content": _joined(item.content)})
                continue
            last = found[-1] if found and found[-1]["role"] == "assistant" else None
            if last is None or isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and last["content"]):
                found.append(last := {"role": "assistant", "content": ""})
            if isinstance(item, FunctionCallItem):
                function = {"name": item.name, "arguments": item.arguments}
                last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            else:
                last["content" if isinstance(item, MessageItem) else "reasoning_content"] = _joined(item.content)
        return found


def _joined(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponsesReply(Reply):
    """The response to one request, of items that follow one another: reasoning, a message, calls.

    Args:
        asked: the request, of which `body` is the chat.
    """

    def __init__(
        self, asked: ResponsesRequest, body: ChatRequest, choices: Sequence[Choice], prompt_tokens: int
    ) -> None:
        super().__init__(body, choices, prompt_tokens)
        not_told = {"input", "stream", "include", "chat_template_kwargs"}
        asked_fields = asked.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=not_told)
        self._output: list[dict[str, Any]] = []  # the last item is open
        self._response = {
            **asked_fields,
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "store": False,
            "output": self._output,
        }
        self._num_events = 0

    def whole(self, results: Sequence[ManyResult]) -> dict[str, Any]:
        """The response in one piece."""
        (choice,) = self.choices
        self.event(0, choice.message, choice.logprobs)
        self.last_events(results)
        return self._response

    def first_events(self) -> str:
        """The events that open the response."""
        names = ("response.created", "response.in_progress")
        return "".join(self._told(name, response=self._response) for name in names)

    def event(self, index: int, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> str:
        """The events of what is certain now."""
        return "".join(self._events(delta, logprobs))

    def last_event(self, index: int) -> str:
        """Nothing: the response has one text, which ends with it."""
        return ""

    def last_events(self, results: Sequence[ManyResult]) -> str:
        """The events that end the response."""
        is_cut = self.choices[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        ending = "".join(self._end_item(status))
        counts = self.usage(results)
        self._response |= {"status": status, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}
        self._response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
            "spec_stats": counts["spec_stats"],
        }
        return ending + self._told(f"response.{status}", response=self._response)

    def error_event(self, described: dict[str, Any]) -> str:
        """The event of an error."""
        return self._told("error", error=described, **{name: described[name] for name in ("code", "message", "param")})

    def _events(self, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> Iterator[str]:
        if text := delta.get("reasoning_content"):
            if not self._is_open("reasoning"):
                yield from self._begin_item("reasoning", {"summary": [], "content": []})
            yield self._add_text(text)
        text = delta.get("content", "")
        if text and not self._is_open("message"):
            yield from self._begin_item("message", {"role": "assistant", "content": []})
        if (text or logprobs) and self._is_open("message"):
            self._output[-1]["content"][0]["logprobs"] += logprobs
            yield self._add_text(text, logprobs=logprobs)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                head = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin_item("function_call", head)
            if arguments := call["function"]["arguments"]:
                self._output[-1]["arguments"] += arguments
                yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _is_open(self, kind: str) -> bool:
        return bool(self._output) and self._output[-1]["type"] == kind

    def _begin_item(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """End the item that is open and begin another, with an empty part of text where it has parts."""
        yield from self._end_item("completed")
        item = {"id": _new_id(PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield self._told("response.output_item.added", output_index=len(self._output) - 1, item=item)
        if kind in PARTS:
            item["content"].append({**copy.deepcopy(PARTS[kind]), "text": ""})
            yield self._of_item("response.content_part.added", content_index=0, part=item["content"][0])

    def _add_text(self, text: str, **fields: Any) -> str:
        part = self._output[-1]["content"][0]
        part["text"] += text
        return self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **fields)

    def _end_item(self, status: str) -> Iterator[str]:
        """End the item that is open, if one is."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] in PARTS:
            part = item["content"][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, **told)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            told = {name: item[name] for name in ("name", "arguments")}
            yield self._of_item("response.function_call_arguments.done", **told)
        yield self._told("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _of_item(self, event: str, **fields: Any) -> str:
        """An event of the item that is open."""
        return self._told(event, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _told(self, event: str, **fields: Any) -> str:
        self._num_events += 1
        document = {"type": event, "sequence_number": self._num_events - 1, **fields}
        return f"event: {event}\ndata: {json.dumps(document)}\n\n"


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
