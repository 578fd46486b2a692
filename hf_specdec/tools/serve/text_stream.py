"""Tokens to text as they come: whole characters only, and nothing of a stop string. Knows nothing of models."""

from collections.abc import Collection, Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: decodes.
        stop (`Sequence[str]`): texts at which the answer ends; they are no part of it.
        skipped: tokens that are no part of the text; by default all special ones.

    Attributes:
        has_stopped (`bool`): whether one of them was met.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skipped: Collection[int] | None = None) -> None:
        self._tokenizer, self._stop, self._skipped = tokenizer, [text for text in stop if text], skipped
        self._token_ids: list[int] = []
        self._context = self._decoded = 0  # tokens before those that the last piece was decoded after, and before it
        self._held = ""
        self.has_stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that is certain now."""
        self._token_ids.extend(token for token in token_ids if token not in (self._skipped or ()))
        return self._release(self._new_text(), is_end=False)

    def end(self) -> str:
        """The rest of the text."""
        return self._release(self._new_text(is_end=True), is_end=True)

    def num_tokens(self, text: str) -> int:
        """Tokens of a piece of text."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0

    def _new_text(self, *, is_end: bool = False) -> str:
        """Decoded with the tokens before, on which spaces and joined bytes depend."""
        before = self._decode(self._token_ids[self._context : self._decoded])
        text = self._decode(self._token_ids[self._context :])
        if not is_end and (len(text) <= len(before) or text.endswith(INCOMPLETE)):
            return ""
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skipped is None))

    def _release(self, text: str, *, is_end: bool) -> str:
        if self.has_stopped:
            return ""
        self._held += text
        places = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.has_stopped = True
            released, self._held = self._held[: min(places)], ""
            return released
        keep = 0 if is_end else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` may go on from."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
