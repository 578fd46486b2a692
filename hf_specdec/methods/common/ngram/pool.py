"""The texts of earlier calls, searched like one text: bounded memory, the oldest texts leave first.

Two generations of an `NgramIndex`: texts go into the young one; when it is full it becomes the old one, and the old
one's texts are forgotten. So adding a token stays O(1) and nothing is ever re-indexed. Safe to share between threads.
"""

from collections.abc import Sequence

from hf_specdec.methods.common.ngram.index import NgramIndex
from hf_specdec.methods.common.shared_state import SharedState

BOUNDARY = -1  # between two texts; no token id, so no match crosses it
MAX_NGRAM_SIZE = 4


class NgramPool(SharedState):
    """Indexed texts of at most `max_tokens` tokens in all.

    Args:
        max_tokens (`int`): bound of the memory, in tokens of text; a text longer than half of it is cut at the front.
        max_ngram_size (`int`, *optional*, defaults to `4`): longest n-gram that can be looked up.
    """

    def __init__(self, max_tokens: int, max_ngram_size: int = MAX_NGRAM_SIZE) -> None:
        super().__init__()
        self.max_tokens, self.max_ngram_size = max_tokens, max_ngram_size
        self._young, self._old = NgramIndex(max_ngram_size), NgramIndex(max_ngram_size)

    def __len__(self) -> int:
        """Tokens kept, boundaries between texts counted."""
        with self._lock:
            return len(self._young) + len(self._old)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a finished text."""
        half = self.max_tokens // 2
        kept = tokens[-(half - 1) :] if half > 1 else ()
        if not kept:
            return
        with self._lock:
            if len(self._young) + len(kept) + 1 > half:
                self._old, self._young = self._young, NgramIndex(self.max_ngram_size)
            self._young.extend(kept)
            self._young.extend([BOUNDARY])

    def search(self, ngram: Sequence[int], *, limit: int) -> list[tuple[NgramIndex, int]]:
        """At most `limit` places after occurrences of `ngram` in earlier texts, newest first, with their index.

        What is returned may be read without the lock: an index only ever grows at its end.
        """
        if len(ngram) > self.max_ngram_size:
            return []
        with self._lock:
            places = [(self._young, place) for place in self._young.places(ngram, limit)]
            places += [(self._old, place) for place in self._old.places(ngram, limit - len(places))]
        return [(index, place) for index, place in places if index.tokens[place] != BOUNDARY]

    @property
    def indexes(self) -> tuple[NgramIndex, NgramIndex]:
        """The young and the old generation, which only ever grow at their ends."""
        with self._lock:
            return self._young, self._old

    def generations(self) -> tuple[list[int], list[int]]:
        """The texts of the old and of the young generation, a boundary after each text."""
        with self._lock:
            return list(self._old.tokens), list(self._young.tokens)

    def restore(self, old: Sequence[int], young: Sequence[int]) -> None:
        """Hold these texts, as `generations` gave them."""
        indexes = NgramIndex(self.max_ngram_size), NgramIndex(self.max_ngram_size)
        for index, tokens in zip(indexes, (old, young), strict=True):
            index.extend(tokens)
        with self._lock:
            self._old, self._young = indexes
