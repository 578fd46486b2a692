"""Tokens as text: each alone, and each as what it adds to a text."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

NUM_CONTEXT = 8  # tokens of the prompt that say how the first new ones are spelled
INCOMPLETE = "\ufffd"  # what a decoder writes for a part of a character


class Words:
    """Texts of one call's tokens.

    Args:
        tokenizer: of the model.
        prompt_ids: of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.context = list(prompt_ids[-NUM_CONTEXT:])
        self._known: dict[int, str] = {}

    def word(self, token: int) -> str:
        """The text of one token alone."""
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def all(self, tokens: Iterable[int]) -> tuple[str, ...]:
        """The texts of several, each alone."""
        return tuple([self.word(token) for token in tokens])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text that each token adds; a character of several tokens belongs to the last of them."""
        ids, pieces = [*self.context, *tokens], list[str]()
        start, end = 0, len(self.context)  # the last complete piece, which says how the next one is spelled
        for place in range(len(self.context), len(ids)):
            before, now = self._decode(ids[start:end]), self._decode(ids[start : place + 1])
            is_last = place == len(ids) - 1
            if now.endswith(INCOMPLETE) and not is_last and place - end < 4:
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            start, end = max(start, end - 1), place + 1
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)
