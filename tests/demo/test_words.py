"""Pieces of text: together they are the text, whatever the tokens are."""

from typing import Any

import pytest

from hf_specdec.tools.demo.recorder import Words

TEXTS = [
    "def main():\n    return 1\n",
    "d\u00e9j\u00e0 vu \U0001f9ea\u200d\U0001f52c done",
    "\t\t\x00\x1b[0m",
    " leading",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(tokenizer: Any, text: str) -> None:
    prompt, ids = tokenizer("import os\n")["input_ids"], tokenizer(text)["input_ids"]
    pieces = Words(tokenizer, prompt).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text


def test_a_character_of_several_tokens_belongs_to_the_last(tokenizer: Any) -> None:
    ids = tokenizer("\U0001f9ea")["input_ids"]
    assert len(ids) > 1
    assert Words(tokenizer, [5]).pieces(ids) == [""] * (len(ids) - 1) + ["\U0001f9ea"]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Any) -> None:
    ids = tokenizer("a\U0001f9ea")["input_ids"][:-1]
    assert "".join(Words(tokenizer, [5]).pieces(ids)).endswith("\ufffd")
