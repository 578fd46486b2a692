"""Grammars of answers: JSON by a schema and calls by a tool's parameters, with plain generation's text."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from hf_specdec.tools.serve.protocol import ChatRequest
from hf_specdec.tools.serve.requests import RequestReader
from tests.helpers.support import plain
from tests.serve.conftest import NAME, connected
from tests.serve.test_tools import TEMPLATE

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "write a stack"}]
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["x"],
    "additionalProperties": False,
}
PARAMETERS = {
    "properties": {"name": {"type": "string", "maxLength": 5}, "place": {"$ref": "#/$defs/Place"}},
    "required": ["name", "place"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": {"additionalProperties": False}, "strict": True}},
]
FIND = '{"name": "find", "arguments": {"name": "ab", "place": {"x": 3}}}'
STOP = '{"name": "stop", "arguments": {}}'


def reader(target: Any, tokenizer: Any) -> RequestReader:
    return RequestReader(target, tokenizer, NAME, max_new_tokens=9)


def accepts(target: Any, tokenizer: Any, text: str, **fields: Any) -> bool:
    request = ChatRequest(model=NAME, messages=MESSAGES, **fields)
    row = reader(target, tokenizer)._grammar(request)["logits_processor"][0].of_row(0)
    row.follow([0])
    return bool(row.descend([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))


def test_a_required_call_has_the_parameters_of_an_offered_tool(target: Any, tool_tokenizer: Any) -> None:
    one: Any = {"type": "function", "function": {"name": "find"}}
    for text, tools, choice, is_right in (
        (FIND, TOOLS, "required", True),
        (STOP, TOOLS, "required", True),
        (STOP, TOOLS[:1], "required", False),
        (STOP, TOOLS, one, False),
        (FIND.replace("3", "33"), TOOLS, "required", False),  # 9 is the largest
        (FIND + FIND, TOOLS, "required", False),
        ("Hi", TOOLS, "required", False),
    ):
        assert accepts(target, tool_tokenizer, text, tools=tools, tool_choice=choice) == is_right, text


@pytest.mark.parametrize("is_special", [False, True])
def test_text_may_come_before_strict_calls(target: Any, tool_tokenizer: Any, is_special: bool) -> None:
    tokenizer = copy.deepcopy(tool_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=is_special)
    find, stop = (f"<tool_call>\n{call}\n</tool_call>" for call in (FIND, STOP))
    for text in ("", "Hi <b>\n", find, f"Hi {find}", f"<think>\nx\n</think>\n\n{find}\n{stop}"):
        assert accepts(target, tokenizer, text, tools=TOOLS), text
    for text in (find.replace("3", "33"), f"Hi {find.replace('find', 'found')}", f"{find}Hi"):
        assert not accepts(target, tokenizer, text, tools=TOOLS), text


def test_reasoning_that_the_template_opens_ends_before_a_grammar(target: Any, tool_tokenizer: Any) -> None:
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    for fields, ending in (
        ({}, "<think>\n"),
        ({"response_format": {"type": "json_object"}}, "<think>\n\n</think>\n\n"),
        ({"tools": TOOLS, "tool_choice": "required"}, "<think>\n\n</think>\n\n<tool_call>\n"),
    ):
        request = ChatRequest(model=NAME, messages=MESSAGES, **options, **fields)
        ids = reader(target, tool_tokenizer).read(request)["input_ids"][0]
        assert tool_tokenizer.decode(ids).endswith(f"# assistant:{ending}")


@pytest.fixture(scope="module")
def tool_tokenizer(chat_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def caller(target: Any, tool_tokenizer: Any) -> Iterator[openai.OpenAI]:
    with connected(target, tool_tokenizer, max_new_tokens=120, spec_method="auto") as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}], ids=str)
def test_a_required_call_is_plain_generation_s_under_its_grammar(
    caller: openai.OpenAI, target: Any, tool_tokenizer: Any, choice: Any
) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": choice}
    options["temperature"] = 0
    request = ChatRequest(model=NAME, messages=MESSAGES, tools=TOOLS[:1], tool_choice=choice)
    inputs = reader(target, tool_tokenizer).read(request)
    length = inputs["input_ids"].shape[1]
    kwargs: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False}
    alone = plain(target, inputs["input_ids"], logits_processor=inputs["logits_processor"], **kwargs)
    answer = caller.chat.completions.create(**options, logprobs=True)
    text = "".join(entry.token for entry in answer.choices[0].logprobs.content)  # type: ignore[union-attr]
    assert text == tool_tokenizer.decode(alone[0, length:], skip_special_tokens=True)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0  # type: ignore[union-attr, operator]
    with caller.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (answer.choices[0], streamed):
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert 0 <= json.loads(call.function.arguments)["place"]["x"] <= 9


class Stack(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: bool
    kind: str = pydantic.Field(max_length=6)


def test_parse_of_the_real_client_gives_an_object(caller: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    choice = caller.chat.completions.parse(**options, response_format=Stack).choices[0]
    assert isinstance(choice.message.parsed, Stack) and choice.finish_reason == "stop"
    with caller.chat.completions.stream(**options, response_format=Stack) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "not": {"const": 1}}}, "required": ["a"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    text = caller.chat.completions.create(**options, response_format=form).choices[0].message.content
    assert set(json.loads(text or "")) == {"a"}, "what llguidance cannot follow is left out where it is not strict"
