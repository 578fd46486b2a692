"""Tools: calls in the formats of model families, offered, parsed, streamed and answered through the real client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.protocol import ChatRequest
from hf_specdec.tools.serve.requests import RequestReader
from tests.serve.conftest import NAME, Script, connected

TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }} are called in <tool_call>\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "# assistant:{% if enable_thinking %}<think>\n{% endif %}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ANSWERS = [
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Genf", "days": 2}}</tool_call>\n',
    "Warm in all three.",
]


def answer(prompt: str) -> str:
    """A call, then two at once, then text: by the answers that the prompt holds."""
    if "plain question" in prompt:
        return "<tool_call>{no call} is JSON</tool_call> of mine."
    if "# user: think" in prompt:
        return "<think>\nhard\n</think>\n\nEasy."
    return ANSWERS[min(prompt.count("# tool:"), 2)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def client(target: Any, tokenizer: Any) -> Iterator[openai.OpenAI]:
    with connected(target, tokenizer, script=Script(tokenizer, answer), max_new_tokens=120) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], *, is_streamed: bool, **options: Any) -> Any:
    """The choice of an answer, of a stream as the client's own helper puts it together."""
    fields: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0, "tools": TOOLS, **options}
    if not is_streamed:
        return client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_three_turns_calls_tools(client: openai.OpenAI, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    calls: list[list[Any]] = []
    while True:
        choice = ask(client, messages, is_streamed=is_streamed)
        if choice.finish_reason != "tool_calls":
            break
        message = choice.message
        calls.append([(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls])
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}) | {"role": "assistant"})
        for call in messages[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "20 °C"})
    assert calls == [
        [("weather", {"city": "Zürich"})],
        [("weather", {"city": "Bern"}), ("weather", {"city": "Genf", "days": 2})],
    ]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Warm in all three.")
    assert messages[1]["content"] == "Let me see."
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids), "which templates of Mistral's models check"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_is_cut_is_left_out(client: openai.OpenAI, is_streamed: bool) -> None:
    messages: Any = [{"role": "user", "content": "x"}, {"role": "user", "content": "\n# tool: y"}]
    options: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0}
    length = client.chat.completions.create(**options).usage.completion_tokens - 12
    answer = client.chat.completions.create(**options, max_tokens=length, stream=is_streamed)
    state = ChatCompletionStreamState()
    for chunk in answer if is_streamed else ():
        state.handle_chunk(chunk)
    choice: Any = (state.current_completion_snapshot if is_streamed else answer).choices[0]
    assert choice.finish_reason == "length" and not choice.message.content
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Bern"}']


def test_one_call_is_all_where_they_may_not_be_parallel(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}, {"role": "user", "content": "\n# tool: y"}]
    for is_streamed in (False, True):
        choice = ask(client, messages, is_streamed=is_streamed, parallel_tool_calls=False)
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Bern"}']
        assert choice.finish_reason == "tool_calls"
    options: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0}
    lengths = [
        client.chat.completions.create(**options, parallel_tool_calls=many).usage.completion_tokens
        for many in (False, True)
    ]
    assert lengths[0] < lengths[1]


def test_no_tool_is_offered_where_none_may_be_called(client: openai.OpenAI) -> None:
    """The prompt has none, and what looks like a call is text."""
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    answers = [
        client.chat.completions.create(model=NAME, messages=messages, temperature=0, **options)
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "auto"})
    ]
    prompts = [answer.usage.prompt_tokens for answer in answers]  # type: ignore[union-attr]
    assert prompts[0] == prompts[1] < prompts[2]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content == ANSWERS[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_no_call_is_text(client: openai.OpenAI, is_streamed: bool) -> None:
    choice = ask(client, [{"role": "user", "content": "plain question"}], is_streamed=is_streamed)
    assert choice.message.content == "{no call} is JSON of mine."
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
def test_reasoning_is_split_off(client: openai.OpenAI, is_streamed: bool, tools: Any) -> None:
    messages: Any = [{"role": "user", "content": "think"}]
    choice = ask(client, messages, is_streamed=is_streamed, tools=tools or openai.omit)
    assert (choice.message.reasoning_content, choice.message.content) == ("hard", "Easy.")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_that_the_template_opens_is_split_off(target: Any, tokenizer: Any, is_streamed: bool) -> None:
    script = Script(tokenizer, lambda prompt: "so it is\n</think>\n\nYes.", opening="<think>\n")
    with connected(target, tokenizer, script=script) as client:
        extra = {"chat_template_kwargs": {"enable_thinking": True}}
        messages: Any = [{"role": "user", "content": "x"}]
        choice = ask(client, messages, is_streamed=is_streamed, tools=openai.omit, extra_body=extra)
    assert (choice.message.reasoning_content, choice.message.content) == ("so it is", "Yes.")


USER = {"role": "user", "content": "x"}


def called(arguments: str) -> dict[str, Any]:
    """A chat in which a function was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


STRICT = {**TOOLS[0], "function": {"name": "f", "strict": True}}
JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id must come with the role tool"),
        ({"messages": [{"role": "user"}]}, "content must be set"),
        (called("{"), "function.arguments: Invalid JSON"),
        (called('{"a": ' * 900 + "1" + "}" * 900), "function.arguments: Invalid JSON"),
        (called('{"a": "\\ud800"}'), "function.arguments: Invalid JSON"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "must be variables of the template"),
        ({"chat_template_kwargs": {"messages": []}}, "must be messages that the chat template takes"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice must be one of tools"),
        ({"tools": TOOLS, **JSON}, "response_format must be text where tools are offered"),
        ({"tools": [STRICT]}, "`tools` must not be strict where <tool_call> is no token"),
    ],
)
def test_what_is_wrong_about_tools_is_named(client: openai.OpenAI, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.chat.completions.create(model=NAME, messages=[USER], extra_body=fields)


@pytest.mark.parametrize(
    ("template", "text"),
    [("{{ messages }}", "the chat template takes none"), ("{{ tools }}", "no template shows how calls")],
)
def test_tools_that_the_model_cannot_read_or_call_are_refused(target: Any, template: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    tokenizer.chat_template = template
    reader = RequestReader(target, tokenizer, NAME, max_new_tokens=4)
    with pytest.raises(ConfigError, match=text):
        reader.read(ChatRequest(model=NAME, messages=[USER], tools=TOOLS))  # type: ignore[list-item]
