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

import itertools
import weakref
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from hf_specdec.errors import ConfigError

WINDOW = 12  # tokens of context in front of what is encoded
MOST_TAIL = 16  # tokens that wait for a word boundary
INCOMPLETE = "\ufffd"  # what decoding makes of bytes that are no character yet
MOST_BYTES = 8  # tokens that may wait for a character's other bytes
ANCHORS = ("\n", "a")
ROLES = ("bos_token", "eos_token", "pad_token")
MOST_ALONE = 0.01  # tokens that only the larger of two alike vocabularies has, as a share of those of both

# Of pairs of tokenizers that were compared, whether they are alike: large vocabularies take a tenth of a second.
_COMPARED: weakref.WeakKeyDictionary[Tokenizer, weakref.WeakKeyDictionary[Tokenizer, bool]]
_COMPARED = weakref.WeakKeyDictionary()


class Vocabulary:
    """One tokenizer, with some of its special tokens read as other texts.

    Args:
        special_texts: what special tokens are read as, by their ids; others as they are written.
    """

    def __init__(self, tokenizer: Tokenizer, special_texts: Mapping[int, str] | None = None) -> None:
        self.tokenizer, self.special_texts = tokenizer, dict(special_texts or {})

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        pieces = []
        for special, run in itertools.groupby(ids, self.special_texts.get):
            tokens = list(run)
            if special is None:
                text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            else:
                text = special * len(tokens)
            pieces.append(text)
        return "".join(pieces)

    def text_after(self, ids: Sequence[int], more: Sequence[int]) -> str:
        """Text that `more` tokens add to that of `ids`."""
        context = list(ids[-WINDOW:])
        before, whole = self.text(context).rstrip(INCOMPLETE), self.text([*context, *more])
        return whole[len(before) :] if whole.startswith(before) else self.text(more)

    def ids_after(self, ids: Sequence[int], text: str) -> list[int]:
        """Tokens of `text` where it goes on after the text of `ids`, whose tokens stay as they are."""
        for context in (self.text(ids[-WINDOW:]), *ANCHORS) if text else ():
            before, whole = self.encoded(context), self.encoded(context + text)
            if context and whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encoded(text)

    def encoded(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokens of a text, with those that begin every text where `is_start`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=is_start)
        return ids


class Translation:
    """One row's text in the target's and the draft's vocabulary.

    Args:
        target, draft: the tokenizers.

    Attributes:
        fixed: the draft's tokens that stay.
        tail: those after them, for now.
        new_text (`str`): characters that the target's last tokens have completed.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.target, self.draft = Vocabulary(target, _special_texts(target, draft)), Vocabulary(draft)
        self._ends = {draft.eos_token_id: target.eos_token_id}
        self._specials = {*draft.all_special_ids} - {draft.unk_token_id}
        self.fixed: list[int] = []
        self.tail: list[int] = []
        self.new_text = self._tail_text = ""
        self._ids: list[int] = []
        self._num_read = 0  # of the target's tokens, those whose characters are complete

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text of the target's tokens."""
        self._ids, self._num_read = list(prompt_ids), 0
        ids = self.draft.encoded(self._new_text(), is_start=True) or self.draft.encoded("\n")
        if ids[-1] == self.draft.tokenizer.eos_token_id and len(ids) > 1:
            ids.pop()  # of tokenizers that end what they encode
        count = 1
        while count < len(ids) and self.draft.text(ids[:count]).endswith(INCOMPLETE):
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
        count = next((place for place, token in enumerate(ids) if self.ends(token)), len(ids))
        end = self._ends.get(ids[count]) if count < len(ids) else None
        text = self.draft.text_after([*self.fixed, *self.tail], ids[:count]).rstrip(INCOMPLETE)
        begun = self._ids[self._num_read :]
        tokens = self.target.ids_after(self._ids[: self._num_read], text)
        if tokens[: len(begun)] != begun:
            return []
        return tokens[len(begun) :] + ([] if end is None else [end])

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
        self._num_read = len(self._ids)  # tokens that each end within a character: the last one is read with the next
        return self.target.text_after(read, new).rstrip(INCOMPLETE)

    def _fix(self) -> list[int]:
        """Move tokens from the tail to those that stay: up to the last word boundary, or the oldest of too many."""
        size, most = len(self.tail), 4 * MOST_TAIL
        for count in range(size - 1, max(size - most, 0), -1):  # the next character may join the last token
            text = self.draft.text_after(self.fixed, self.tail[:count])
            rest = self._tail_text[len(text) :]
            if not self._tail_text.startswith(text) or text.endswith(INCOMPLETE) or not rest:
                continue
            if rest[0].isspace() or size - count >= MOST_TAIL:
                return self._move(count, rest)
        return self._move(size, "") if size > most else []  # of a tokenizer whose tokens have no texts of their own

    def _move(self, count: int, rest: str) -> list[int]:
        moved, self.tail, self._tail_text = self.tail[:count], self.tail[count:], rest
        self.fixed += moved
        return moved


def share_token_ids(target: Tokenizer, draft: Tokenizer) -> bool:
    """True if the ids of two tokenizers are the same tokens, so that nothing has to be translated.

    What texts are split into decides: an id that both have must be one token, and one of them may have a few more, as
    vocabularies that were padded. Added tokens may differ, as those of models of one family that were taught other
    markup do: no text is split into them.
    """
    compared = _COMPARED.setdefault(target, weakref.WeakKeyDictionary())
    if draft not in compared:
        compared[draft] = target is draft or _have_same_tokens(target, draft)
    return compared[draft]


def _have_same_tokens(target: Tokenizer, draft: Tokenizer) -> bool:
    ours, theirs = _tokens(target), _tokens(draft)
    common = ours.keys() & theirs.keys()
    num_alone = max(len(ours), len(theirs)) - len(common)
    return num_alone <= MOST_ALONE * len(common) and all(ours[number] == theirs[number] for number in common)


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """By id, the tokens that texts are split into; those of a tokenizer that has none but added ones."""
    tokens, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    return {number: token for token, number in tokens.items() if token not in added or len(added) == len(tokens)}


def check_tokenizers(tokenizer: object, assistant_tokenizer: object) -> None:
    """Raise unless both are tokenizers.

    Raises:
        ConfigError: one of them is missing, or something else.
    """
    for name, value in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
        if not isinstance(value, Tokenizer):
            rule = "must be a tokenizer where the draft model has one of its own"
            shown = value if value is None else type(value).__name__
            raise ConfigError(name, rule, shown, "Pass tokenizer= and assistant_tokenizer=.")


def _special_texts(target: Tokenizer, draft: Tokenizer) -> dict[int, str]:
    """Texts of the target's special tokens: the draft's end for its end, nothing for those that begin or pad."""
    texts: dict[int, str] = {}
    for role in ROLES:
        token = getattr(target, f"{role}_id")
        if token is not None:
            texts.setdefault(token, (getattr(draft, role) or "") if role == "eos_token" else "")
    return texts
