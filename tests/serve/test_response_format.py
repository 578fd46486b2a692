"""`response_format`: answers by a schema over loopback, with plain generation's text."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

import hf_specdec
from tests.helpers.support import plain
from tests.serve.conftest import NAME

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "write a stack"}]
PROMPT = "# user: write a stack\n# assistant:"


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
            "failed to compile JSON schema: Unimplemented keys",
        ),
    ],
)
def test_a_bad_format_is_refused_by_name(client: openai.OpenAI, asked: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=asked)


def test_a_schema_that_no_text_can_end_is_the_request_s_error(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "required": ["a"]}}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed any further: no token may follow"):
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=asked, max_tokens=40)


def test_twenty_streams_at_once_follow_a_schema_each(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Each is plain generation's under its own grammar, whoever shares the batch."""

    def schema(number: int) -> dict[str, Any]:
        kind = {"type": "string", "maxLength": 4 + number % 3}
        return {
            "type": "object",
            "properties": {f"key{number}": kind},
            "required": [f"key{number}"],
            "additionalProperties": False,
        }

    def stream(number: int) -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema(number)}}
        events = client.chat.completions.create(
            model=NAME, messages=MESSAGES, response_format=form, max_tokens=30, temperature=0, stream=True
        )
        return "".join(event.choices[0].delta.content or "" for event in events)

    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(stream, range(20)))
    ids = chat_tokenizer(PROMPT, return_tensors="pt").input_ids
    for number, text in enumerate(texts):
        processor = hf_specdec.grammar(chat_tokenizer, json_schema=schema(number))
        alone = plain(target, ids, max_new_tokens=30, do_sample=False, logits_processor=[processor])
        assert text == chat_tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert list(json.loads(text)) == [f"key{number}"]
