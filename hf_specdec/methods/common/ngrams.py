"""N-grams of a growing text, and of the texts of earlier calls.

Adding a token takes amortised O(1), and a look-up the same work at any length.

A *place* is a position in the text after an earlier occurrence of an n-gram: the token there followed it then. The
compiled core keeps a hash table and links; without it the text is scanned.

The texts of earlier calls are searched like one text, in bounded memory. They are two generations of an `NgramIndex`:
texts go into the young one; when it is full it becomes the old one, and the old one's texts are forgotten. So nothing
is ever indexed anew. Safe to share between threads. Knows nothing about drafts or models.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hf_specdec.kernels import native
from hf_specdec.methods.common.entry import SharedState

NUM_COMMON = 32  # ranked tokens; 64 drafted no better on recorded chat answers, 16 did below 32 nodes
FIRST_SLOTS = 64
ADDED_AT_ONCE = 1_024  # tokens for which the table has room before they are added
BOUNDARY = -1  # between two texts; no token id, so no match crosses it
MAX_NGRAM_SIZE = 4


class TopCounts:
    """Counts of all tokens, and a ranking of `size` of them, largest first, the earlier one first among equals.

    Args:
        size (`int`): how many tokens are ranked; a change costs at most that many swaps.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[int, int] = {}
        self._total = 0
        self._ranking, self._ranked = array("i"), array("q")  # tokens and their counts

    def add(self, token: int) -> None:
        """Count `token` once more."""
        ranking, ranked = self._ranking, self._ranked
        self._total += 1
        count = self._counts[token] = self._counts.get(token, 0) + 1
        rank = ranking.index(token) if token in ranking else len(ranking)
        if rank == len(ranking) < self._size:
            ranking.append(token)
            ranked.append(count)
        elif rank == len(ranking):
            if count <= ranked[-1]:
                return
            rank -= 1
        while rank > 0 and ranked[rank - 1] < count:
            ranking[rank], ranked[rank] = ranking[rank - 1], ranked[rank - 1]
            rank -= 1
        ranking[rank], ranked[rank] = token, count

    @property
    def arrays(self) -> "tuple[array[int], array[int], int]":
        """The ranked tokens, their counts, and the sum of all counts with the unseen ones."""
        return self._ranking, self._ranked, self._total + self._size


class NgramIndex:
    """Tokens of a text and, for every n-gram up to `max_ngram_size`, its occurrences, newest first.

    Occurrences are linked: each position knows the one before it where the same n-gram ended, so adding a token costs
    one entry of a hash table an order and a look-up walks as many links as it returns places. The table has a slot an
    n-gram, `end * num_orders + size - 1` of its newest end; its tokens are compared in the text, and 0 is an empty
    slot. All are arrays of 32 bits: about 40 bytes a token at four orders.

    Attributes:
        tokens (`array`): the text.
        max_ngram_size (`int`): longest n-gram that is looked up.
        common (`TopCounts`): tokens by the number of different tokens that they follow (the lowest order of
            Kneser-Ney smoothing): the best prediction after a context that was never seen. Empty without a core.
    """

    def __init__(self, max_ngram_size: int) -> None:
        self.tokens = array("i")
        self.max_ngram_size = max_ngram_size
        self.common = TopCounts(NUM_COMMON)
        self.num_orders = max(2, max_ngram_size)  # pairs tell which tokens a token has followed
        self._older = array("i")  # (tokens, orders): for each position the one before it, 0 for none
        self._newest = _zeros(FIRST_SLOTS)  # of every n-gram, its newest end
        self._num_ngrams = 0

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if native.core is not None and len(self._older) < len(self.tokens):  # of a machine without the core
            tokens = self.tokens
            self.__init__(self.max_ngram_size)  # type: ignore[misc]
            self.extend(tokens)

    @property
    def arrays(self) -> "tuple[array[int], array[int], array[int], int]":
        """The text, the links, the table and the number of orders, as the compiled core takes them."""
        return self.tokens, self._older, self._newest, self.num_orders

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens after the text."""
        if native.core is None:
            self.tokens.extend(tokens)
            return
        rest = iter(tokens)
        while piece := tuple(islice(rest, ADDED_AT_ONCE)):
            for token in self._add(piece):
                self.common.add(token)

    def places(self, ngram: Sequence[int], limit: int) -> list[int]:
        """Find at most `limit` positions that follow an occurrence of `ngram`, newest first; the text's end is none."""
        if native.core is not None:
            return native.core.places(*self.arrays, tuple(ngram), limit)
        count = len(self.tokens) - len(ngram)  # of positions that a token follows
        if count < 1 or not 0 < len(ngram) <= self.num_orders:
            return []
        text, is_found = np.array(self.tokens), np.ones(count, dtype=np.bool_)
        for offset, token in enumerate(ngram):
            is_found &= text[offset : offset + count] == token
        places: list[int] = (np.flatnonzero(is_found)[::-1][:limit] + len(ngram)).tolist()
        return places

    def match_length(self, place: int, context: Sequence[int], limit: int) -> int:
        """Count how many of the last tokens of `context` are also in front of `place`, up to `limit`."""
        text, end = self.tokens, len(context)
        longest = min(limit, place, end)
        length = 0
        while length < longest and text[place - 1 - length] == context[end - 1 - length]:
            length += 1
        return length

    def _add(self, tokens: Sequence[int]) -> list[int]:
        """Add tokens; the table has room for their n-grams. Returns the second tokens of new pairs."""
        assert native.core is not None
        most = self._num_ngrams + len(tokens) * self.num_orders
        if 3 * most > 2 * len(self._newest):
            self._newest = _zeros(1 << (3 * most // 2).bit_length())
            native.core.link(*self.arrays, 0)
        start = len(self.tokens)
        self._older += _zeros(len(tokens) * self.num_orders)
        self.tokens.extend(tokens)
        added, followers = native.core.link(*self.arrays, start)
        self._num_ngrams += added
        return followers


def _zeros(count: int) -> "array[int]":
    return array("i", bytes(4 * count))


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
