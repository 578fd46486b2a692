"""Where the n-grams of a growing text stood before: amortised O(1) per token, the same work per look-up at any length.

A *place* is a position in the text after an earlier occurrence of an n-gram: what stands there followed it then.
Knows nothing about drafts or models.

    index = NgramIndex(max_ngram_size=2)
    index.extend([5, 6, 7, 5, 6])
    index.places([5, 6], limit=8)      # [2]: token 7 followed 5, 6
"""

from collections.abc import Iterable, Sequence

from hf_specdec.methods.ngram.top_counts import TopCounts

__all__ = ["NgramIndex"]


NUM_COMMON = 32  # ranked tokens; 64 drafted no better on recorded chat answers, 16 did below 32 nodes


class NgramIndex:
    """Tokens of a text and, for every n-gram up to `max_ngram_size`, its occurrences, newest first.

    Occurrences are linked: each position knows the one before it where the same n-gram ended, so adding a token costs
    one dictionary entry an order and a look-up walks as many links as it returns places.

    Attributes:
        tokens (`list[int]`): the text.
        max_ngram_size (`int`): longest n-gram that is looked up.
        common (`TopCounts`): tokens by the number of different tokens that they follow (the lowest order of
            Kneser-Ney smoothing): the best prediction after a context that was never seen.
    """

    def __init__(self, max_ngram_size: int) -> None:
        self.tokens: list[int] = []
        self.max_ngram_size = max_ngram_size
        self.common = TopCounts(NUM_COMMON)
        self._pairs: set[tuple[int, int]] = set()
        self._newest: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram_size)]
        self._older: list[list[int]] = [[] for _ in range(max_ngram_size)]

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens after the text."""
        text = self.tokens
        for token in tokens:
            if text and token >= 0 and (text[-1], token) not in self._pairs:
                self._pairs.add((text[-1], token))
                self.common.add(token)
            text.append(token)
            end = len(text)
            for size, (newest, older) in enumerate(zip(self._newest, self._older, strict=True), start=1):
                if end < size:
                    older.append(0)
                    continue
                key = tuple(text[end - size :])
                older.append(newest.get(key, 0))
                newest[key] = end

    def places(self, ngram: Sequence[int], limit: int) -> list[int]:
        """At most `limit` positions that follow an occurrence of `ngram`, newest first; the text's end is none."""
        size, text_length = len(ngram), len(self.tokens)
        found: list[int] = []
        place = self._newest[size - 1].get(tuple(ngram), 0)
        older = self._older[size - 1]
        while place and len(found) < limit:
            if place < text_length:
                found.append(place)
            place = older[place - 1]
        return found

    def match_length(self, place: int, context: Sequence[int], limit: int) -> int:
        """How many of the last tokens of `context` also stand in front of `place`, counted up to `limit`."""
        text, end = self.tokens, len(context)
        longest = min(limit, place, end)
        length = 0
        while length < longest and text[place - 1 - length] == context[end - 1 - length]:
            length += 1
        return length
