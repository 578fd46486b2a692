"""One text in two vocabularies: whatever the text, both say the same characters, and what is fixed stays."""

import gc
import itertools
import weakref
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.translation import MOST_TAIL, Translation, check_tokenizers, share_token_ids
from tests.helpers.tokenizers import byte_level, characters, marked

SAMPLES = [
    "the theme of them all is thin air",
    "naïve café 日本語 über 🙂🙃 don't",
    "  def f(x):\n\n\treturn x  # the end",
] * 3
PIECES = [
    "the",
    "th",
    "e",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "日",
    "本",
    "🙂",
    "🏳️‍🌈",
    "e\u0301",
    "</s>",
    "<s>",
    "\x00",
    "\ufffd",
    "don't",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=24).map("".join)
SMALL, LARGE, MARKED, LETTERS = byte_level(SAMPLES, 260), byte_level(SAMPLES, 330), marked(SAMPLES, 420), characters()
PAIRS = {"bytes": (LARGE, SMALL), "larger": (SMALL, LARGE), "marked": (SMALL, MARKED), "of marked": (MARKED, LARGE)}


def read(translation: Translation) -> str:
    """What the draft has read, fixed and tail."""
    draft = translation.draft.tokenizer
    ids = [token for token in (*translation.fixed, *translation.tail) if token not in draft.all_special_ids]
    text: str = draft.decode(ids, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", ["bytes", "larger"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 40), step=st.integers(1, 5))
@example(text="日" * 9, cut=0, step=1)  # each token ends within a character
@example(text="本日日日日日日🙂🙂🙂é日", cut=4, step=2)
def test_the_draft_reads_the_targets_text(name: str, text: str, cut: int, step: int) -> None:
    """However the text grows, the draft has read every character that is complete; fixed tokens never change."""
    assume("\ufffd\ufffd" not in text)  # decoding writes it for incomplete bytes, and several cannot be told from those
    target, draft = PAIRS[name]
    ids = [token for token in target.encode("x" + text) if token > 1]
    cut = min(cut, len(ids) - 1) + 1
    translation = Translation(target, draft)
    translation.begin(ids[:cut])
    for start in range(cut, len(ids), step):
        fixed = list(translation.fixed)
        moved = translation.extend(ids[start : start + step])
        assert translation.fixed == fixed + moved
    whole = target.decode(ids, clean_up_tokenization_spaces=False)
    assert whole.startswith(read(translation))
    assert len(whole.encode()) - len(read(translation).encode()) <= 4 * 8


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, cut=st.integers(1, 40), count=st.integers(0, 12))
def test_drafts_are_the_drafts_characters(name: str, text: str, cut: int, count: int) -> None:
    """The draft goes on with the rest of the text: what comes out continues the target's tokens to that text."""
    target, draft = PAIRS[name]
    ids = [token for token in target.encode("the " + text, add_special_tokens=False) if token > 2]
    whole = target.decode(ids, clean_up_tokenization_spaces=False)
    translation = Translation(target, draft)
    translation.begin(ids[:cut])
    read_ids = [*translation.fixed, *translation.tail]
    rest = draft.encode(whole, add_special_tokens=False)
    rest = rest[len(read_ids) :] if rest[: len(read_ids)] == read_ids else []
    drafted = translation.drafted(rest[:count])
    assert all(0 <= token < len(target) for token in drafted)
    said = target.decode([*ids[:cut], *drafted], clean_up_tokenization_spaces=False).rstrip("\ufffd")
    assert whole.startswith(said) or 0 in drafted or "\ufffd" in whole


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, len(SMALL) - 1), min_size=1, max_size=30), cut=st.integers(1, 30))
def test_any_tokens_are_read(ids: list[int], cut: int) -> None:
    """Special ones in the middle, halves of characters, bytes that are none: nothing raises, drafts are tokens."""
    for draft in (LARGE, MARKED, LETTERS):
        translation = Translation(SMALL, draft)
        translation.begin(ids[:cut])
        for token in ids[cut:]:
            translation.extend([token])
        assert translation.fixed
        assert all(0 <= token < len(SMALL) for token in translation.drafted([3, 2, 1, 0]))


def test_a_text_that_begins_within_a_character_begins_as_a_new_line() -> None:
    """The draft needs something to read."""
    first, *others = SMALL.encode("é")
    translation = Translation(SMALL, LARGE)
    translation.begin([first])
    assert read(translation) == "\n"
    translation.extend(others)
    assert read(translation) == "\né"


def test_a_character_waits_for_its_bytes() -> None:
    first, *others = SMALL.encode("🙂")
    assert others, "the tokenizer splits it"
    translation = Translation(SMALL, LETTERS)
    translation.begin([*SMALL.encode("ab"), first])
    assert read(translation) == "ab"
    translation.extend(others)
    assert translation.draft.tokenizer.unk_token_id in translation.tail


def test_a_draft_completes_a_character_that_the_target_has_begun() -> None:
    """The target's token stays; drafted are those after it."""
    first, *others = SMALL.encode("é")
    translation = Translation(SMALL, LARGE)
    translation.begin([*SMALL.encode("caf"), first])
    assert translation.drafted(LARGE.encode("é x")) == [*others, *SMALL.encode(" x")]
    assert translation.drafted(LARGE.encode("日")) == [], "another character"


def test_a_token_that_ends_within_a_word_is_joined_with_what_follows() -> None:
    """The draft has a token for all of "theme"; it never sees "the" and "me" for good."""
    (theme,) = LARGE.encode(" theme")
    translation = Translation(SMALL, LARGE)
    translation.begin(SMALL.encode("a th"))
    translation.extend(SMALL.encode("eme"))
    assert [*translation.fixed, *translation.tail][-1] == theme


def test_text_without_spaces_is_fixed_too() -> None:
    translation = Translation(SMALL, LARGE)
    translation.begin(SMALL.encode("日"))
    for _ in range(30):
        translation.extend(SMALL.encode("本語"))
    assert len(translation.tail) <= MOST_TAIL + 8
    assert read(translation) == "日" + 30 * "本語"


def test_special_tokens_are_exchanged_by_their_role() -> None:
    translation = Translation(SMALL, MARKED)
    translation.begin([SMALL.bos_token_id, *SMALL.encode("the end"), SMALL.eos_token_id, *SMALL.encode("the")])
    ids = [*translation.fixed, *translation.tail]
    assert MARKED.eos_token_id in ids
    end, *others = [SMALL.eos_token_id]
    assert translation.drafted([*MARKED.encode("me", add_special_tokens=False)[-1:], MARKED.eos_token_id])[-1] == end
    assert not others


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="`tokenizer` must be a tokenizer"):
        check_tokenizers(None, SMALL)
    with pytest.raises(ConfigError, match="`assistant_tokenizer` must be a tokenizer .*'str'"):
        check_tokenizers(SMALL, "path")
    check_tokenizers(SMALL, LARGE)
    assert share_token_ids(SMALL, byte_level(SAMPLES, 260))
    assert not share_token_ids(SMALL, LARGE)


def test_vocabularies_of_one_family_are_alike() -> None:
    """Also where each has markup of its own, or one a token more that texts are split into."""
    texts = ["def add(a, b):", "import os"]
    base, more, other = (byte_level(texts, 265) for _ in range(3))
    more.add_tokens(["<think>", "</think>"])
    other.add_tokens(["<tool>"])
    padded = byte_level(texts, 266)
    assert len(padded.get_vocab()) == len(base.get_vocab()) + 1
    for first, second in itertools.permutations((base, more, other, padded), 2):
        assert share_token_ids(first, second)


def test_an_id_that_is_two_tokens_makes_vocabularies_foreign() -> None:
    base = byte_level(["def add(a, b):"], 262)
    other = byte_level(["class Reader"], 262)
    assert base.get_vocab().keys() != other.get_vocab().keys()
    assert not share_token_ids(base, other)
    assert not share_token_ids(LETTERS, SMALL)


def test_a_pair_is_compared_once_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    kind = type(SMALL)
    vocabulary = kind.get_vocab
    monkeypatch.setattr(kind, "get_vocab", lambda tokenizer: compared.append(tokenizer) or vocabulary(tokenizer))
    target, draft = byte_level(SAMPLES, 300), byte_level(SAMPLES, 310)
    results = [share_token_ids(target, draft) for _ in range(3)]
    assert results == [False] * 3
    assert compared == [target, draft]
    compared.clear()
    references = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None]
