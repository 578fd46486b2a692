"""Reasoning and calls in answers, by the formats that tokenizers, transformers and chat templates know."""

import json
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.tools.serve.answer import TextStream
from hf_specdec.tools.serve.calls import ChatFormat

F = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
OWN_TEMPLATE = {
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "repeats": True,
        },
        "content": {},
    },
}
Calls = list[tuple[str, Any]]


def chat_format(tokenizer: Any, name: str) -> ChatFormat:
    """The format of a chat template that shows `<tool_call>`, of a tokenizer's own template or of a model's type."""
    other = copy(tokenizer)
    other.chat_template = "{{ tools }} <think> <tool_call>" if name == "hermes" else "{{ tools }}"
    if name == "own":
        other.response_template = OWN_TEMPLATE
    return ChatFormat.of(other, SimpleNamespace(config=SimpleNamespace(model_type=name)))


def parsed(tokenizer: Any, name: str, text: str, size: int, **ending: bool) -> tuple[str, Calls]:
    """Content and calls of a text that comes in pieces."""
    parser = chat_format(tokenizer, name).parser(tokenizer("x <|im_start|>assistant\n# assistant:").input_ids, F)
    deltas = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(parser.push("", is_end=True, **ending))
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(parser.num_calls))
    functions = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return "".join(delta.get("content", "") for delta in deltas), functions


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"Hi\n{CALL}", "Hi", [("f", {"a": 1})]),
        ("hermes", f"{CALL}\n{CALL}\n", "", [("f", {"a": 1})] * 2),
        ("hermes", f"{CALL} Done", " Done", [("f", {"a": 1})]),
        ("hermes", "<tool_call>{no call} is JSON</tool_call> of mine", "{no call} is JSON of mine", []),
        ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", {})]),
        ("hermes", "a[1] = {2} < 3", "a[1] = {2} < 3", []),
        ("qwen3", f"<think>\nhm\n</think>\n\n{CALL}", "", [("f", {"a": 1})]),
        (
            "qwen3_5",
            "ok<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "ok",
            [("f", {"a": 1})],
        ),
        ("gemma4", '<|tool_call>call:f{a:1,b:<|"|>{"<|"|>}<tool_call|>', "", [("f", {"a": 1, "b": '{"'})]),
        ("own", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ],
)
def test_calls_are_parsed_whatever_the_pieces(
    chat_tokenizer: Any, name: str, text: str, content: str, calls: Calls, size: int
) -> None:
    assert parsed(chat_tokenizer, name, text, size) == (content, calls)


@settings(deadline=None)
@given(st.text(alphabet=list('</tool_call>};{[TOOL_CALLS]"\\\n é'), max_size=40), st.integers(1, 9))
def test_arguments_may_hold_every_marker(chat_tokenizer: Any, text: str, size: int) -> None:
    """Also those that end a call: the call ends where its JSON does."""
    for markers in ("</tool_call>", "}; {", "[TOOL_CALLS]", ""):
        call = {"name": "f", "arguments": {"a": [text + markers], "</tool_call>": markers + text}}
        written = json.dumps(call, ensure_ascii=False)
        wanted = [("f", call["arguments"])]
        hermes = f"Hi<tool_call>{written}</tool_call>" * 2
        assert parsed(chat_tokenizer, "hermes", hermes, size)[1] == wanted * 2
        assert parsed(chat_tokenizer, "own", f"[TOOL_CALLS]{written}" * 2, size) == ("", wanted * 2)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Hi<tool_call>{"name": "f", "argu', "Hi", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}', "", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ("hermes", f"{CALL}\n<tool_", "", [("f", {"a": 1})]),
        ("qwen3", f'{CALL}\n<tool_call>{{"name"', "", [("f", {"a": 1})]),
        ("qwen3_5", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<param", "", []),
    ],
)
def test_what_is_cut_inside_a_call_is_no_text(
    chat_tokenizer: Any, name: str, text: str, content: str, calls: Calls, size: int
) -> None:
    assert parsed(chat_tokenizer, name, text, size, is_cut=True) == (content, calls)


def test_special_tokens_that_mark_calls_are_read_and_others_left_out(chat_tokenizer: Any) -> None:
    tokenizer = deepcopy(chat_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<|im_end|>"]})
    marker, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "<|im_end|>"])
    form = chat_format(tokenizer, "hermes")
    with_tools, without = (form.skipped(form.parser([5], tools).fields) for tools in (F, []))
    assert marker in without - with_tools and end in with_tools


TEXT = "def größe(x):\n    return '→ ☂ 漢字' + x  # naïve\n\n\nclass A:\n    pass\n"


class Letters:
    """A tokenizer with one token for each byte."""

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def pieces(text: str, stop: tuple[str, ...] = (), size: int = 1) -> list[str]:
    stream = TextStream(Letters(), stop)
    ids = list(text.encode())
    return [
        *(stream.push(ids[start : start + size]) for start in range(0, len(ids), size)),
        stream.push([], is_end=True),
    ]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_pieces_are_whole_characters_and_add_up(size: int) -> None:
    parts = pieces(TEXT, size=size)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in piece for piece in parts)


def test_real_tokens_add_up(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer(TEXT).input_ids
    assert "".join([*(stream.push([token]) for token in ids), stream.push([], is_end=True)]) == tokenizer.decode(ids)


@pytest.mark.parametrize("stop", [("return",), ("'→", "return '"), ("\n\n",), ("x",), ("漢",)])
@pytest.mark.parametrize("size", [1, 3])
def test_the_text_ends_before_a_stop_string(stop: tuple[str, ...], size: int) -> None:
    wanted = TEXT[: min(TEXT.index(text) for text in stop)]
    parts = pieces(TEXT, stop, size)
    assert "".join(parts) == wanted
    assert all(wanted.startswith("".join(parts[:count])) for count in range(len(parts)))


def test_what_only_begins_like_a_stop_string_is_given_out() -> None:
    assert "".join(pieces("abcab", ("abd", "cax"))) == "abcab"


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    stream = TextStream(Letters())
    assert stream.push("→".encode()[:2]) == ""
    assert stream.push([], is_end=True) == "\ufffd"
