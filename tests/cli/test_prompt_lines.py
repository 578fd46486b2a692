"""Lines of prompts are read alike by every command."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.tools.prompt_lines import NotAPromptError, PromptLine, read_line

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, ANSWERED = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
TEXT_FORMS: list[Any] = ["Hello", {"prompt": "Hello"}, {"text": "Hello"}]
CHAT_FORMS: list[Any] = [
    {"messages": [ASKED]},
    {"messages": [ASKED, ANSWERED]},
    {"prompt": [ASKED]},
    {"turns": ["Hello"]},
    {"instruction": "Hello"},
    {"instruction": "Hello", "input": ""},
    {"question": "Hello"},
]


def test_a_text_is_continued() -> None:
    for form in TEXT_FORMS:
        assert read_line(json.dumps(form)) == PromptLine(("Hello",))


@pytest.mark.parametrize("form", CHAT_FORMS, ids=json.dumps)
def test_a_chat_goes_through_the_template_where_there_is_one(form: Any) -> None:
    line = read_line(json.dumps(form))
    assert line.chat == [ASKED]
    assert line.goes_through_template(SimpleNamespace(chat_template="{{ messages }}"))
    assert not line.goes_through_template(SimpleNamespace(chat_template=None))
    assert line.text == "Hello"


def test_a_chat_keeps_what_was_said_before_the_model_answers() -> None:
    later = {"role": "user", "content": "And then?"}
    line = read_line(json.dumps({"id": 7, "category": "talk", "messages": [SYSTEM, ASKED, ANSWERED, later, ANSWERED]}))
    assert line.before == (SYSTEM, ASKED, ANSWERED)
    assert line.turns == ("And then?",)
    assert (line.name, line.task) == ("7", "talk")
    assert line.text == "Be brief.\n\nHello\n\nHi\n\nAnd then?"


def test_an_instruction_s_input_stands_behind_it() -> None:
    for key in ("input", "context"):
        assert read_line(json.dumps({"instruction": "Translate", key: "Hello"})).turns == ("Translate\n\nHello",)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({"messages": []}, "end with a message of a user"),
        ({"messages": [SYSTEM]}, "end with a message of a user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r'messages with "role" \(system, developer'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, '"content", a text'),
        ({"turns": ["Hello", ""]}, "none of them empty"),
        ({"turns": ["Hello", 3]}, "turns of text"),
        ({"messages": [{"role": "system", "content": "a\ud800"}, ASKED]}, "character 1 is half of a pair"),
        ({"words": "Hello"}, '"messages"'),
    ],
)
def test_what_is_wrong_with_a_line_is_said(value: Any, rule: str) -> None:
    with pytest.raises(NotAPromptError, match=rule):
        read_line(json.dumps(value))
