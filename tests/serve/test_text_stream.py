"""Pieces of text add up to the whole, break no character, and hold nothing of a stop string."""

from typing import Any

import pytest

from hf_specdec.tools.serve.answer import TextStream

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
