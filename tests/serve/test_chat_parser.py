"""Parsers of tool calls: each family's format, in pieces, cut, found in the template or told by a file."""

import json
from copy import copy
from typing import Any

import pytest
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.chat_format import ChatFormat

CALL = [("f", {"a": 1})]
BOTH = [("f", {"a": 1}), ("g", {})]
FORMS = [
    ("hermes", 'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Hi", CALL),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        "",
        BOTH,
    ),
    ("hermes", '<tool_call>{"name": "f", "argu', '{"name": "f", "argu', []),
    ("hermes", 'a<tool_call>[1]</tool_call>b<tool_call>{"name": "g"}</tool_call>', "a[1]b", [("g", {})]),
    (
        "qwen3_coder",
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "ok",
        CALL,
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", BOTH),
    ("mistral", 'x[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "x", BOTH),
    ("pythonic", "[f(a=1), g()]", "", BOTH),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Done", "Done", CALL),
    ("pythonic", "[1, 2] and [f(a=1)]", "[1, 2] and [f(a=1)]", []),
    ("pythonic", "[f(a=1, b)]", "[f(a=1, b)]", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", CALL),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", BOTH),
    ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
]
F = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "content", "calls"), FORMS)
def test_each_family_s_calls_are_parsed_whatever_the_pieces(
    tokenizer: Any, name: str, text: str, content: str, calls: Any, size: int
) -> None:
    parser = ChatFormat.of(tokenizer, name).parser([], F)
    told, found = parsed(parser, text, size)
    assert told == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert parser.num_calls == len(calls)


def parsed(parser: Any, text: str, size: int, **ending: bool) -> tuple[str, list[list[str]]]:
    """Content and calls of a text that comes in pieces."""
    deltas = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(parser.push("", is_end=True, **ending))
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            calls.append([call["function"]["name"], ""])
        assert call["index"] == len(calls) - 1
        calls[-1][1] += call["function"]["arguments"]
    return "".join(delta.get("content", "") for delta in deltas), calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Hi<tool_call>{"name": "f", "argu', "Hi", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}', "", [["f", '{"a": "}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [["f", '{"a": 1}']]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"na', "", [["f", '{"a": 1}']]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a":', "", [["f", '{"a":']]),
        ("llama3_json", '{"answer": 3', '{"answer": 3', []),
        ("llama3_json", '{"name": "f", "par', "", []),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a', "", [["f", '{"a']]),
        ("pythonic", "<|tool_call_start|>[f(a=1", "", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<param",
            "",
            [["f", '{"a": 1}']],
        ),
    ],
)
def test_what_is_cut_inside_a_call_is_no_text(
    tokenizer: Any, name: str, text: str, content: str, calls: Any, size: int
) -> None:
    assert parsed(ChatFormat.of(tokenizer, name).parser([], F), text, size, is_cut=True) == (content, calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("return a json object within <tool_call></tool_call> tags", "hermes"),
        ("reply in <tool_call>\n<function=example>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("respond in the format [func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_format_is_what_the_chat_template_shows(tokenizer: Any, template: str, name: str) -> None:
    other = copy(tokenizer)
    other.chat_template = template
    text, _, calls = next((text, content, calls) for form, text, content, calls in FORMS if form == name)
    parser = ChatFormat.of(other).parser([], F)
    delta = parser.push(text, is_end=True)
    assert parser.num_calls == len(calls) == len(delta["tool_calls"])


def test_special_tokens_that_mark_calls_are_read_and_others_left_out(tokenizer: Any) -> None:
    own = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    own.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<|im_end|>"]})
    own.chat_template = "[TOOL_CALLS]"
    marker, end = own.convert_tokens_to_ids(["[TOOL_CALLS]", "<|im_end|>"])
    form = ChatFormat.of(own)
    assert marker not in form.parser([], F).skipped  # type: ignore[operator]
    assert end in form.parser([], F).skipped  # type: ignore[operator]
    assert form.parser([], []).skipped is None


def test_a_response_template_of_the_tokenizer_or_a_file_comes_first(tokenizer: Any, tmp_path: Any) -> None:
    field = {"open": "CALL ", "content": "json", "transform": {"type": "function", "function": "{content}"}}
    template = {"start_anchor": "assistant:", "fields": {"tool_calls": field, "content": {}}}
    own = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    own.response_template = template
    file = tmp_path / "template.json"
    file.write_text(json.dumps(template))
    for form in (ChatFormat.of(own), ChatFormat.of(tokenizer, str(file))):
        parser = form.parser(tokenizer("# assistant:").input_ids, F)
        assert parser.push('CALL {"name": "f", "arguments": {}}', is_end=True)["tool_calls"][0]["function"] == {
            "name": "f",
            "arguments": "{}",
        }
    file.write_text('{"fields": 3}')
    for wrong in (str(file), str(tmp_path / "none.json")):
        with pytest.raises(ConfigError, match=r"`--tool-parser` must (be a response template|name a JSON file)"):
            ChatFormat.of(tokenizer, wrong)
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        ChatFormat.of(tokenizer, "hermess")
