"""One text in two vocabularies: what a draft model with a tokenizer of its own reads, and what its drafts say.

Texts meet as characters. Of the draft's tokens, those up to a recent word boundary are fixed, so that its cache never
has to forget them; the few after it are encoded anew as the text grows, since a tokenizer may join them with what
follows. Characters that are not complete yet, of a token that holds some of their bytes, wait. Special tokens are
exchanged by their role. Whatever goes wrong here costs acceptance, and never changes the text.

    text = Translation(tokenizer, assistant_tokenizer)
    text.begin(prompt_ids)
    text.fixed, text.tail           # what the draft model has read for good, and what it reads with each draft
    text.extend([17, 4])            # the target's new tokens
    text.drafted([31, 7, 7])        # the draft's tokens after the tail, as the target's
"""

import weakref
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from hf_specdec.errors import ConfigError

WINDOW = 12  # tokens of context in front of what is encoded
MOST_TAIL = 16  # tokens that wait for a word boundary
LAST_TOKENS = 1  # of the text, that are never fixed: the next character may join them
INCOMPLETE = "\ufffd"  # what decoding makes of bytes that are no character yet
MOST_BYTES = 8  # tokens that may wait for a character's other bytes
ANCHORS = ("\n", "a")
ROLES = ("bos_token", "eos_token", "pad_token")
MOST_ALONE = 0.01  # tokens that one of two alike vocabularies may have alone, as a share of those of both

# Of pairs of tokenizers that were compared, whether they are alike: large vocabularies take a tenth of a second.
_COMPARED: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, weakref.WeakKeyDictionary[PreTrainedTokenizerBase, bool]]
_COMPARED = weakref.WeakKeyDictionary()


class Vocabulary:
    """One tokenizer, with some of its special tokens read as other texts.

    Args:
        special_texts: what special tokens are read as, by their ids; others as they are written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_texts: Mapping[int, str] | None = None) -> None:
        self.tokenizer, self.special_texts = tokenizer, dict(special_texts or {})

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        pieces, plain = [], list[int]()
        for token in ids:
            if token in self.special_texts:
                pieces += [self._decoded(plain), self.special_texts[token]]
                plain = []
            else:
                plain.append(token)
        return "".join([*pieces, self._decoded(plain)])

    def text_after(self, ids: Sequence[int], more: Sequence[int]) -> str:
        """Text that `more` tokens add to that of `ids`."""
        before = list(ids[-WINDOW:])
        known, whole = self.text(before).rstrip(INCOMPLETE), self.text([*before, *more])
        return whole[len(known) :] if whole.startswith(known) else self.text(more)

    def ids_after(self, ids: Sequence[int], text: str) -> list[int]:
        """Tokens of `text` where it goes on after the text of `ids`, whose tokens stay as they are."""
        if not text:
            return []
        for before in (self.text(ids[-WINDOW:]), *ANCHORS):
            known, whole = self.encoded(before), self.encoded(before + text)
            if before and whole[: len(known)] == known:
                return whole[len(known) :]
        return self.encoded(text)

    def encoded(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokens of a text, with those that begin every text where `is_start`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=is_start)
        return ids

    def _decoded(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class Translation:
    """One row's text in the target's and the draft's vocabulary.

    Args:
        target, draft: the tokenizers.

    Attributes:
        fixed: the draft's tokens that stay.
        tail: those after them, for now.
        new_text (`str`): characters that the target's last tokens have completed.
    """

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self.target = Vocabulary(target, _exchanged(target, draft))
        self.draft = Vocabulary(draft)
        self._ends = {_id(draft, "eos_token"): _id(target, "eos_token")}
        self._specials = {*draft.all_special_ids} - {_id(draft, "unk_token")}
        self.fixed: list[int] = []
        self.tail: list[int] = []
        self.new_text = self._tail_text = ""
        self._ids: list[int] = []
        self._num_read = 0  # of the target's tokens, those whose characters are complete

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text of the target's tokens."""
        self._ids, self._num_read = list(prompt_ids), 0
        text = self._new_text()
        ids = self.draft.encoded(text, is_start=True) or self.draft.encoded("\n")
        if ids[-1] == _id(self.draft.tokenizer, "eos_token") and len(ids) > 1:
            ids.pop()  # of tokenizers that end what they encode
        count = max(len(ids) - MOST_TAIL, 1)
        while count < len(ids) and self.draft.text(ids[:count][-WINDOW:]).endswith(INCOMPLETE):
            count += 1
        self.fixed, self.tail = ids[:count], ids[count:]
        self._tail_text = self.draft.text_after(self.fixed, self.tail)
        self._fix()

    def extend(self, ids: Sequence[int]) -> list[int]:
        """The text goes on with the target's tokens `ids`; returns the draft's that are fixed by now, in addition."""
        self._ids += ids
        self.new_text = self._new_text()
        self._tail_text += self.new_text
        self.tail = self.draft.ids_after(self.fixed, self._tail_text)
        return self._fix()

    def drafted(self, ids: Sequence[int]) -> list[int]:
        """The draft's tokens after the tail, as tokens that the target's text may go on with."""
        ends, plain = list[int](), list(ids)
        for place, token in enumerate(plain):
            if token in self._specials:
                end = self._ends.get(token)
                ends, plain = [] if end is None else [end], plain[:place]
                break
        text = self.draft.text_after([*self.fixed, *self.tail], plain).rstrip(INCOMPLETE)
        read, begun = self._ids[: self._num_read], self._ids[self._num_read :]
        tokens = self.target.ids_after(read, text)
        if tokens[: len(begun)] != begun:
            return []
        return tokens[len(begun) :] + ends

    @property
    def tokens_a_token(self) -> float:
        """The target's tokens of the text for each of the draft's."""
        return self._num_read / (len(self.fixed) + len(self.tail))

    def ends(self, token: int) -> bool:
        """True if nothing is read of a draft after its token `token`."""
        return token in self._specials

    def _new_text(self) -> str:
        """Characters that the target's tokens have completed since the last time."""
        read, new = self._ids[: self._num_read], self._ids[self._num_read :]
        for count in range(len(new), max(len(new) - MOST_BYTES, 0), -1):
            text = self.target.text_after(read, new[:count])
            if not text.endswith(INCOMPLETE):
                self._num_read += count
                return text
        if len(new) < MOST_BYTES:
            return ""
        self._num_read = len(self._ids)  # bytes that never become a character
        return self.target.text_after(read, new)

    def _fix(self) -> list[int]:
        """Move tokens from the tail to those that stay: up to the last word boundary, or the oldest of too many."""
        for count in range(len(self.tail) - LAST_TOKENS, 0, -1):
            text = self.draft.text_after(self.fixed, self.tail[:count])
            rest = self._tail_text[len(text) :]
            if not self._tail_text.startswith(text) or text.endswith(INCOMPLETE) or not rest:
                continue
            if rest[0].isspace() or len(self.tail) - count >= MOST_TAIL:
                moved, self.tail = self.tail[:count], self.tail[count:]
                self.fixed += moved
                self._tail_text = rest
                return moved
        if len(self.tail) <= 4 * MOST_TAIL:
            return []
        moved, self.tail, self._tail_text = self.tail, [], ""  # of a tokenizer whose tokens have no texts of their own
        self.fixed += moved
        return moved


def are_alike(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bool:
    """True if the ids of two tokenizers are the same tokens, so that nothing has to be translated.

    What texts are split into decides: an id that both have must be one token, and one of them may have a few more, as
    vocabularies that were padded. Added tokens may differ, as those of models of one family that were taught other
    markup do: no text is split into them.
    """
    if target is draft:
        return True
    compared = _COMPARED.setdefault(target, weakref.WeakKeyDictionary())
    if draft not in compared:
        compared[draft] = _have_same_tokens(target, draft)
    return compared[draft]


def _have_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bool:
    own, other = _tokens(target), _tokens(draft)
    common = own.keys() & other.keys()
    num_alone = max(len(own), len(other)) - len(common)
    return num_alone <= MOST_ALONE * len(common) and all(own[number] == other[number] for number in common)


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """By id, the tokens that texts are split into; those of a tokenizer that has none but added ones."""
    known, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    return {number: token for token, number in known.items() if token not in added or len(added) == len(known)}


def check_tokenizers(tokenizer: object, assistant_tokenizer: object) -> None:
    """Raise unless both are tokenizers.

    Raises:
        ConfigError: one of them is missing, or something else.
    """
    for name, value in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
        if not isinstance(value, PreTrainedTokenizerBase):
            rule = "must be a tokenizer where the draft model has one of its own"
            given = value if value is None else type(value).__name__
            raise ConfigError(name, rule, given, "Pass tokenizer= and assistant_tokenizer=.")


def _exchanged(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> dict[int, str]:
    """Maps the target's special tokens to the draft's own of the same role, except where a text only begins."""
    found: dict[int, str] = {}
    for role in ROLES:
        token = _id(target, role)
        if token is not None and token not in found:
            found[token] = (getattr(draft, role) or "") if role == "eos_token" else ""
    return found


def _id(tokenizer: PreTrainedTokenizerBase, role: str) -> int | None:
    token: int | None = getattr(tokenizer, f"{role}_id")
    return token
