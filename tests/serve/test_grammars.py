"""Grammars of answers: JSON by a schema and calls by a tool's parameters, with plain generation's text."""

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

import hf_specdec
from hf_specdec.engine.sampling.grammar import COMPACT
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.grammars import answer_grammar
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
FIND = '<tool_call>\n{"name": "find", "arguments": {"name": "ab", "place": {"x": 3}}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def marked(tokenizer: Any, marks: list[str], *, is_special: bool = False) -> Any:
    """A tokenizer in which the marks are tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(marks, special_tokens=is_special)
    return other


def accepts(tokenizer: Any, text: str, **options: Any) -> bool:
    row: Any = answer_grammar(tokenizer, [tokenizer.eos_token_id], **options).of_row(0)
    row.follow([0])
    return bool(row.descend([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
def test_required_calls_have_the_parameters_of_offered_tools(chat_tokenizer: Any, marks: list[str]) -> None:
    tokenizer = marked(chat_tokenizer, marks)
    for text in (FIND, STOP):
        assert accepts(tokenizer, text, tools=TOOLS)
    assert accepts(tokenizer, f"{FIND}\n{STOP}", tools=TOOLS, many=True)
    assert not accepts(tokenizer, f"{FIND}\n{STOP}", tools=TOOLS)
    assert not accepts(tokenizer, STOP, tools=TOOLS[:1]), "it is not offered"
    assert not accepts(tokenizer, FIND.replace("3", "33"), tools=TOOLS), "9 is the largest"
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "x-guidance": COMPACT}
    for text in (FIND, STOP, '{"x": 3}'):
        assert accepts(tokenizer, text, tools=TOOLS, schema=schema)
    for text in ("Hi", '{"x": "3"}', f"Hi {FIND}", f'{FIND}{{"x": 3}}'):
        assert not accepts(tokenizer, text, tools=TOOLS, schema=schema)


@pytest.mark.parametrize("is_special", [False, True])
def test_text_may_come_before_strict_calls(chat_tokenizer: Any, is_special: bool) -> None:
    tokenizer = marked(chat_tokenizer, MARKS, is_special=is_special)
    options: dict[str, Any] = {"tools": TOOLS, "many": True, "after_text": True}
    for text in ("", "Hi <b>\n", FIND, f"Hi {FIND}", f"<think>\nx\n</think>\n\n{FIND}\n{STOP}"):
        assert accepts(tokenizer, text, **options), text
    for text in (FIND.replace("3", "33"), f"Hi {FIND.replace('find', 'found')}", f"{FIND}Hi"):
        assert not accepts(tokenizer, text, **options), text
    with pytest.raises(ConfigError, match="must be unset where <tool_call> is no token"):
        accepts(chat_tokenizer, "", **options)


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
def test_a_grammar_begins_after_the_reasoning(chat_tokenizer: Any, marks: list[str]) -> None:
    tokenizer = marked(chat_tokenizer, marks)
    schema = {"type": "object", "properties": {}, "x-guidance": COMPACT}
    for text in ("</think>{}", "so <b>\nit is\n</think>\n\n{}", '{"x": 3}</think> {}'):
        assert accepts(tokenizer, text, schema=schema, after_reasoning=True), text
    for text in ("{}", "so</think>", "so</think>\n\nYes", "so</think>{}</think>{}"):
        assert not accepts(tokenizer, text, schema=schema, after_reasoning=True), text


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
    options |= {"temperature": 0, "parallel_tool_calls": False}
    chat = tool_tokenizer.apply_chat_template(MESSAGES, tools=TOOLS[:1], return_dict=True, return_tensors="pt")
    length = chat["input_ids"].shape[1]
    processor = answer_grammar(tool_tokenizer, [tool_tokenizer.eos_token_id], tools=TOOLS[:1])
    kwargs: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False, "logits_processor": [processor]}
    alone = plain(target, chat["input_ids"], **kwargs)
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


def test_many_streams_at_once_follow_a_schema_each(caller: openai.OpenAI, target: Any, tool_tokenizer: Any) -> None:
    """Each is plain generation's under its own grammar, whoever shares the batch."""

    def schema(number: int) -> dict[str, Any]:
        properties = {f"key{number}": {"type": "string", "maxLength": 4 + number % 3}}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def stream(number: int) -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema(number)}}
        options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "stream": True, "response_format": form}
        events = caller.chat.completions.create(model=NAME, messages=MESSAGES, **options)
        return "".join(event.choices[0].delta.content or "" for event in events)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(stream, range(8)))
    ids = tool_tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_tensors="pt")["input_ids"]
    for number, text in enumerate(texts):
        processor = hf_specdec.grammar(tool_tokenizer, json_schema=schema(number))
        alone = plain(target, ids, max_new_tokens=30, do_sample=False, logits_processor=[processor])
        assert text == tool_tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
