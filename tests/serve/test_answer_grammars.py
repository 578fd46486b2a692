"""`response_format` and forms of tool calls: answers by a schema over loopback, with plain generation's text."""

import copy
import json
import re
from typing import Any

import openai
import pydantic
import pytest

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.answer_grammars import tool_call_grammar
from tests.helpers.support import plain
from tests.serve.conftest import NAME

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "write a stack"}]
PROMPT = "# user: write a stack\n# assistant:"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {
                    "exact": {"type": "boolean"},
                    "name": {"type": "string", "maxLength": 5},
                    "place": {"$ref": "#/$defs/Place"},
                },
                "required": ["name", "place"],
                "additionalProperties": False,
                "$defs": {
                    "Place": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"additionalProperties": False}}},
]


class Stack(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: bool
    kind: str = pydantic.Field(max_length=6)


def test_parse_of_the_real_client_gives_an_object(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    answer = client.chat.completions.parse(**asked, response_format=Stack)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Stack) and answer.choices[0].finish_reason == "stop"
    ids = chat_tokenizer(PROMPT, return_tensors="pt").input_ids
    processor = hf_specdec.grammar(chat_tokenizer, json_schema=Stack)
    alone = plain(target, ids, max_new_tokens=40, do_sample=False, logits_processor=[processor])
    assert message.content == chat_tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    with client.chat.completions.stream(**asked, response_format=Stack) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_json_objects_and_schemas_that_are_not_strict(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "temperature": 0.5, "seed": 1}
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "not": {"const": 1}}}, "required": ["a"]}
    formats: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}},
    ]
    texts = [client.chat.completions.create(**asked, response_format=one).choices[0].message.content for one in formats]
    assert texts[0].startswith("{")
    assert set(json.loads(texts[1])) == {"a"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"type": "json_schema"}, "response_format: json_schema must come with the type json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "and only there"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none"}}}, "Invalid type: none"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"not": {}}}},
            "response_format: `json_schema` must be a grammar that llguidance can follow (Unimplemented keys",
        ),
    ],
)
def test_a_bad_format_is_refused_by_name(client: openai.OpenAI, asked: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=asked)


CALL = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
}
ARGUMENTS = '{"name": "ab", "place": {"x": 3}}'
FORMS = {name: (form % ("find", ARGUMENTS), form % ("stop", "{}")) for name, form in CALL.items()} | {
    "pythonic": ('[find(name="ab", place={"x": 3}, exact=True)]', "[stop()]"),
    "qwen3_coder": (
        "<tool_call>\n<function=find>\n<parameter=name>\na</b\n</parameter>\n"
        '<parameter=place>\n{"x": 3}\n</parameter>\n</function>\n</tool_call>',
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    ),
}


def accepts(processor: Any, tokenizer: Any, text: str) -> bool:
    row = processor.of_row(0)
    row.follow([0])
    return bool(row.descend([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))


@pytest.mark.parametrize("call_format", FORMS)
def test_calls_have_the_form_that_the_model_writes(chat_tokenizer: Any, call_format: str) -> None:
    def made(tools: Any, *, many: bool) -> Any:
        return tool_call_grammar(chat_tokenizer, call_format, tools, [chat_tokenizer.eos_token_id], many=many)

    first, second = FORMS[call_format]
    both = {
        "mistral": f"{first[:-1]}, {second.removeprefix('[TOOL_CALLS][')}",
        "pythonic": f"{first[:-1]}, {second[1:]}",
        "llama3_json": f"{first}; {second}",
    }.get(call_format, f"{first}\n{second}")
    assert accepts(made(TOOLS, many=False), chat_tokenizer, first)
    assert accepts(made(TOOLS, many=False), chat_tokenizer, second)
    assert accepts(made(TOOLS, many=True), chat_tokenizer, both)
    assert not accepts(made(TOOLS, many=False), chat_tokenizer, both)
    assert not accepts(made(TOOLS[:1], many=False), chat_tokenizer, second), "one that is not offered"
    assert not accepts(made(TOOLS, many=True), chat_tokenizer, first.replace("3", "33")), "9 is the largest"


@pytest.mark.parametrize(
    ("call_format", "marks", "text"),
    [
        ("mistral", ["[TOOL_CALLS]", "[ARGS]"], f"[TOOL_CALLS]find[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[ARGS]{{}}"),
        ("mistral", ["[TOOL_CALLS]"], FORMS["mistral"][0]),
        ("hermes", ["<tool_call>", "</tool_call>"], FORMS["hermes"][0]),
        ("pythonic", ["<|tool_call_start|>", "<|tool_call_end|>"], "<|tool_call_start|>[stop()]<|tool_call_end|>"),
    ],
)
def test_marks_that_are_tokens_are_written_as_such(
    chat_tokenizer: Any, call_format: str, marks: list[str], text: str
) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    processor = tool_call_grammar(tokenizer, call_format, TOOLS, [tokenizer.eos_token_id], many=True)
    assert accepts(processor, tokenizer, text)


def test_an_unknown_form_is_refused(chat_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        tool_call_grammar(chat_tokenizer, "hermess", TOOLS, [0], many=True)
