"""The Responses endpoint through the real client: what a chat answers, as items and typed events."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serve.conftest import NAME
from tests.serve.test_tools import ANSWERS, TOOLS, client, tokenizer

__all__ = ["client", "tokenizer"]  # fixtures: answers of a script, by a template of tools and reasoning
FUNCTIONS: Any = [{"type": "function", **TOOLS[0]["function"]}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}


def ask(client: openai.OpenAI, items: Any, *, is_streamed: bool, **options: Any) -> Any:
    """A response, of a stream as the client's own helper puts it together."""
    if not is_streamed:
        return client.responses.create(input=items, **{**GREEDY, **options})
    with client.responses.stream(input=items, **{**GREEDY, **options}) as stream:
        return stream.get_final_response()


@pytest.fixture
def free(url: str) -> Iterator[openai.OpenAI]:
    """A client of the target without a script."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_is_that_of_a_chat(free: openai.OpenAI, is_streamed: bool) -> None:
    user: Any = {"role": "user", "content": "write a stack"}
    chat = free.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, user], **GREEDY)
    options: dict[str, Any] = {**GREEDY, "instructions": "Be brief.", "store": True, "metadata": {"a": "b"}}
    if is_streamed:
        events = list(free.responses.create(input="write a stack", stream=True, **options))
        response: Any = events[-1].response  # type: ignore[union-attr]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
            chat.choices[0].message.content
        )
    else:
        response = free.responses.create(input=[user], **options)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,  # type: ignore[union-attr]
        chat.usage.completion_tokens,  # type: ignore[union-attr]
    )
    assert (response.model, response.instructions, response.metadata) == (NAME, "Be brief.", {"a": "b"})
    assert response.store is False, "nothing is kept"


class Stack(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: bool
    kind: str = pydantic.Field(max_length=6)


def test_parse_and_stream_of_the_client_give_an_object(free: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {**GREEDY, "input": "write a stack", "max_output_tokens": 40}
    response = free.responses.parse(**options, text_format=Stack)
    assert isinstance(response.output_parsed, Stack) and response.status == "completed"
    with free.responses.stream(**options, text_format=Stack) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    again: Any = [{"role": "user", "content": "write a stack"}, *response.output, {"role": "user", "content": "more"}]
    assert isinstance(free.responses.parse(**{**options, "input": again}, text_format=Stack).output_parsed, Stack)
    plain = free.responses.create(**options, text={"format": {"type": "json_object"}})
    assert plain.output_text.startswith("{")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_three_turns_calls_functions(client: openai.OpenAI, is_streamed: bool) -> None:
    """The items of each answer go back as they are, and the model reads what it reads in a chat."""
    items: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    messages: list[Any] = list(items)
    calls: list[list[Any]] = []
    while True:
        response = ask(client, items, tools=FUNCTIONS, is_streamed=is_streamed)
        chat = client.chat.completions.create(messages=messages, tools=TOOLS, **GREEDY)
        assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
        items += response.output
        messages.append(chat.choices[0].message)
        made = [item for item in response.output if item.type == "function_call"]
        if not made:
            break
        calls.append([(call.name, json.loads(call.arguments)) for call in made])
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"} for call in made]
        for call in chat.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "20 °C"})
    assert calls == [
        [("weather", {"city": "Zürich"})],
        [("weather", {"city": "Bern"}), ("weather", {"city": "Genf", "days": 2})],
    ]
    assert (response.status, response.output_text) == ("completed", ANSWERS[2])
    kinds = [getattr(item, "type", None) for item in items]
    assert kinds[1:3] == ["message", "function_call"] and items[1].content[0].text == "Let me see."


def test_events_tell_items_parts_and_arguments_as_they_are_written(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": "How is the weather?"}]
    events: list[Any] = list(client.responses.create(input=items, tools=FUNCTIONS, stream=True, **GREEDY))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(exclude_unset=True, by_alias=True))
    names = [event.type.removeprefix("response.") for event in events]
    text, call = "output_text.delta output_text.done content_part.done", "function_call_arguments"
    assert " ".join(name for number, name in enumerate(names) if name not in names[:number]) == (
        f"created output_item.added content_part.added {text} output_item.done {call}.delta {call}.done completed"
    )
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == '{"city": "Zürich"}'
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        item.type for item in events[-1].response.output
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_is_an_item_that_goes_back(
    client: openai.OpenAI, target: Any, tokenizer: Any, is_streamed: bool
) -> None:
    response = ask(client, "think", is_streamed=is_streamed, include=["reasoning.encrypted_content"])
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", "hard", "Easy.")
    assert response.usage.output_tokens_details.reasoning_tokens == len(tokenizer("hard").input_ids)
    again: Any = [{"role": "user", "content": "think"}, *response.output, {"role": "user", "content": "How?"}]
    assert ask(client, again, is_streamed=is_streamed).output[0].content[0].text == "hard"


def test_earlier_items_are_messages_as_a_chat_has_them() -> None:
    from hf_specdec.tools.serve.responses import ResponsesRequest

    call = {"type": "function_call", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"}
    text = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [text]},
        {**call, "call_id": "1"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "z"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    chat = ResponsesRequest.model_validate({"model": NAME, "input": items}).as_chat()
    messages = [message.for_template() for message in chat.messages]
    function = {"name": "f", "arguments": {}}
    assert messages == [
        {"role": "developer", "content": "ab"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "tool_calls": [{"id": one, "type": "function", "function": function} for one in "12"],
        },
        {"role": "tool", "content": "y", "tool_call_id": "1"},
        {"role": "tool", "content": "z", "tool_call_id": "2"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "none"}}


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: the server does not know this field", "previous"),
        ({"top_logprobs": 2}, "top_logprobs: the server does not know this field", "top_logprobs"),
        ({"background": True}, "background: Input should be False", "background"),
        ({"truncation": "auto"}, "truncation: Input should be 'disabled'", "truncation"),
        ({"max_output_tokens": 4000}, "the model has 2048 positions", "prompt"),
        ({"input": []}, "input", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "`input.0` must be a whole reasoning, message", "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content.0.type: Input", "messages.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.function.name: Field required", "tools.0"),
        ({"tool_choice": "required"}, "tool_choice must be one of tools", None),
        ({"text": {"format": SCHEMA}}, "`response_format` must be a grammar that llguidance", "response_format"),
        ({"text": {"format": SCHEMA | {"schema": None}}}, "response_format.json_schema must hold a schema", None),
        ({"text": {"verbosity": "low"}}, "text.verbosity: Input should be 'format'", "text.verbosity"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    free: openai.OpenAI, fields: dict[str, Any], text: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(text)) as raised:
        free.responses.create(**GREEDY, input="x", extra_body=fields)
    field = raised.value.param
    assert field is None if param is None else (field or "").startswith(param)
