"""Grammars of answers: calls by a tool's schema, beside text, a schema or reasoning, with plain generation's text."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hf_specdec.engine.sampling.grammar import COMPACT
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.answer_grammars import answer_grammar
from hf_specdec.tools.serve.requests import RequestReader
from tests.helpers.support import plain
from tests.serve.conftest import NAME, Script, serving
from tests.serve.test_response_format import MESSAGES, Stack
from tests.serve.test_tools import TEMPLATE

pytest.importorskip("llguidance")

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


def call_grammar(tokenizer: Any, call_format: str, tools: Any, **options: Any) -> Any:
    return answer_grammar(tokenizer, [tokenizer.eos_token_id], tools=tools, call_format=call_format, **options)


def accepts(processor: Any, tokenizer: Any, text: str) -> bool:
    row = processor.of_row(0)
    row.follow([0])
    return bool(row.descend([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))


@pytest.mark.parametrize("call_format", FORMS)
def test_calls_have_the_form_that_the_model_writes(chat_tokenizer: Any, call_format: str) -> None:
    def made(tools: Any, *, many: bool) -> Any:
        return call_grammar(chat_tokenizer, call_format, tools, many=many)

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
    processor = call_grammar(tokenizer, call_format, TOOLS, many=True)
    assert accepts(processor, tokenizer, text)


def test_an_unknown_form_is_refused(chat_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        call_grammar(chat_tokenizer, "hermess", TOOLS, many=True)


def strict(tools: list[Any]) -> list[Any]:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


@pytest.fixture(scope="module")
def tool_tokenizer(chat_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def caller(target: Any, tool_tokenizer: Any) -> Iterator[openai.OpenAI]:
    with (
        serving(target, tool_tokenizer, max_new_tokens=120, spec_method="auto") as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as found,
    ):
        yield found


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "name"),
    [("required", None), ({"type": "function", "function": {"name": "find"}}, "find")],
    ids=["required", "named"],
)
def test_a_call_that_is_required_has_the_tool_s_arguments(
    caller: openai.OpenAI, choice: Any, name: str | None, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": strict(TOOLS), "tool_choice": choice}
    asked |= {"model": NAME, "temperature": 0, "parallel_tool_calls": False}
    if is_streamed:
        with caller.chat.completions.stream(**asked) as stream:
            found = stream.get_final_completion().choices[0]
    else:
        found = caller.chat.completions.create(**asked).choices[0]
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and not found.message.content
    assert name in (None, call.function.name)
    arguments = json.loads(call.function.arguments)
    if call.function.name == "find":
        assert isinstance(arguments["name"], str) and 0 <= arguments["place"]["x"] <= 9
    else:
        assert arguments == {}


def test_a_required_call_is_plain_generation_s_under_its_grammar(
    caller: openai.OpenAI, target: Any, tool_tokenizer: Any
) -> None:
    tool = strict(TOOLS[:1])
    processor = call_grammar(tool_tokenizer, "hermes", tool, many=False)
    chat = tool_tokenizer.apply_chat_template(
        MESSAGES, tools=tool, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = chat["input_ids"]
    alone = plain(target, ids, max_new_tokens=120, do_sample=False, logits_processor=[processor])
    answer = caller.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        tools=tool,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        logprobs=True,
    )
    assert answer.usage.prompt_tokens == ids.shape[1]
    told = "".join(entry.token for entry in answer.choices[0].logprobs.content)
    assert told == tool_tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("is_special", [False, True])
def test_text_may_come_before_strict_calls(chat_tokenizer: Any, is_special: bool) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=is_special)
    processor = call_grammar(tokenizer, "hermes", strict(TOOLS), many=True, after_text=True)
    first, second = FORMS["hermes"]
    for text in ("", "Hi <b>\n", first, f"Hi {first}", f"<think>\nx\n</think>\n\n{first}\n{second}"):
        assert accepts(processor, tokenizer, text), text
    for text in (first.replace("3", "33"), f"Hi {first.replace('find', 'found')}", f"{first}Hi"):
        assert not accepts(processor, tokenizer, text), text
    with pytest.raises(ConfigError, match="must be unset where no token marks calls"):
        call_grammar(tokenizer, "llama3_json", TOOLS, many=True, after_text=True)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "required"}, "tool_choice must be one of tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "must be one of tools"),
        ({"tools": strict(TOOLS)}, "tools: `strict` must be unset where no token marks calls among text"),
    ],
)
def test_choices_that_no_grammar_can_follow_are_named(caller: openai.OpenAI, fields: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(told)):
        caller.chat.completions.create(model=NAME, messages=MESSAGES, extra_body=fields)


@pytest.mark.parametrize("call_format", FORMS)
def test_an_answer_of_a_schema_or_calls(chat_tokenizer: Any, call_format: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    processor = call_grammar(chat_tokenizer, call_format, TOOLS, many=True, schema={**schema, "x-guidance": COMPACT})
    for text in (*FORMS[call_format], '{"x": 3}'):
        assert accepts(processor, chat_tokenizer, text), text
    for text in ("Hi", '{"x": "3"}', f"Hi {FORMS[call_format][0]}", f'{FORMS[call_format][0]}{{"x": 3}}'):
        assert not accepts(processor, chat_tokenizer, text), text


def test_a_schema_beside_tools_is_obeyed_or_a_tool_is_called(caller: openai.OpenAI) -> None:
    """The tokens of the prompt decide between the two; the target has learned neither."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": Stack.model_json_schema()}}
    for bias in ({}, {"60": 100}):
        answer = caller.chat.completions.create(
            model=NAME, messages=MESSAGES, tools=TOOLS, response_format=form, logit_bias=bias, temperature=0
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        if message.tool_calls:
            assert not message.content
        else:
            Stack.model_validate_json(message.content)


@pytest.mark.parametrize("marks", [[], ["<think>", "</think>"]], ids=["text", "tokens"])
def test_a_grammar_begins_after_the_reasoning(chat_tokenizer: Any, marks: list[str]) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.add_tokens(marks)
    schema = {"type": "object", "properties": {}, "x-guidance": COMPACT}
    processor = answer_grammar(tokenizer, [tokenizer.eos_token_id], schema=schema, opened="<think>")
    for text in ("</think>{}", "so <b>\nit is\n</think>\n\n{}", '{"x": 3}</think> {}'):
        assert accepts(processor, tokenizer, text), text
    for text in ("{}", "so</think>", "so</think>\n\nYes", "so</think>{}</think>{}"):
        assert not accepts(processor, tokenizer, text), text


NOTHING = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "additionalProperties": False}},
}


@pytest.mark.parametrize("fields", [{"response_format": NOTHING}, {"tools": TOOLS[1:], "tool_choice": "required"}])
def test_an_answer_after_reasoning_that_the_template_opens(
    target: Any, tool_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    """The model reasons freely, and would write text after it, where the grammar has its way."""
    script = Script(tool_tokenizer, lambda prompt: f"so it is\n</think>\n\n{'Yes. ' * 40}", opening="<think>\n")
    read = RequestReader.read

    def scripted(self: Any, *args: Any) -> dict[str, Any]:
        inputs = read(self, *args)
        return {**inputs, "logits_processor": [script, *inputs["logits_processor"]]}

    monkeypatch.setattr(RequestReader, "read", scripted)
    fields = {**fields, "chat_template_kwargs": {"enable_thinking": True}}
    with (
        serving(target, tool_tokenizer, max_new_tokens=120) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "extra_body": fields}
        message: Any = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
    assert message.reasoning_content == "so it is"
    if message.tool_calls:
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("stop", "{}")]
    else:
        assert message.content == "{}"


def test_a_stop_string_may_cut_tokens_that_the_grammar_forces(caller: openai.OpenAI) -> None:
    """What the drafter proposed after them is not described to the metrics, as it begins anew."""
    answer = caller.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "json please"}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0.8,
        frequency_penalty=0.7,
        seed=114,
        n=3,
        stop=["\n"],
        extra_body={"spec_method": "lookahead"},
    )
    assert [(choice.finish_reason, choice.message.content) for choice in answer.choices] == [("stop", "")] * 3
