"""Tokens to text as they come: whole characters only, and nothing of a stop string. Knows nothing of models."""

from collections.abc import Collection, Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: decodes.
        stop (`Sequence[str]`): texts at which the answer ends; they are no part of it.
        skipped: tokens that are no part of the text.

    Attributes:
        has_stopped (`bool`): whether the text has reached a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skipped: Collection[int] = ()) -> None:
        self._tokenizer, self._stop, self._skipped = tokenizer, [text for text in stop if text], skipped
        self._token_ids: list[int] = []
        self._context = self._decoded = 0  # tokens before those that the last piece was decoded after, and before it
        self._held = ""
        self.has_stopped = False

    def push(self, token_ids: Sequence[int], *, is_end: bool = False) -> str:
        """Take new tokens, the last of them at the end; return the text that is certain now."""
        self._token_ids.extend(token for token in token_ids if token not in self._skipped)
        if self.has_stopped:
            return ""
        self._held += self._new_text(is_end)
        places = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        self.has_stopped = bool(places)
        if places:
            cut = min(places)
        else:
            overlaps = [0] if is_end else [_overlap(self._held, stop) for stop in self._stop]
            cut = len(self._held) - max(overlaps, default=0)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _new_text(self, is_end: bool) -> str:
        """Decode with the tokens before, on which spaces and joined bytes depend."""
        before = str(self._tokenizer.decode(self._token_ids[self._context : self._decoded]))
        text = str(self._tokenizer.decode(self._token_ids[self._context :]))
        if not is_end and (len(text) <= len(before) or text.endswith(INCOMPLETE)):
            return ""
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string may begin with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
