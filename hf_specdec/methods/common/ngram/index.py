"""Where the n-grams of a growing text stood before: amortised O(1) per token, the same work per look-up at any length.

A *place* is a position in the text after an earlier occurrence of an n-gram: what stands there followed it then.
Knows nothing about drafts or models.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from hf_specdec.kernels import native
from hf_specdec.methods.common.ngram import hashing
from hf_specdec.methods.common.ngram.top_counts import TopCounts

NUM_COMMON = 32  # ranked tokens; 64 drafted no better on recorded chat answers, 16 did below 32 nodes
FIRST_SLOTS = 64
ADDED_AT_ONCE = 1_024  # tokens for which the table has room before they are added


class NgramIndex:
    """Tokens of a text and, for every n-gram up to `max_ngram_size`, its occurrences, newest first.

    Occurrences are linked: each position knows the one before it where the same n-gram ended, so adding a token costs
    one entry of a hash table an order and a look-up walks as many links as it returns places. Everything stands in
    arrays of 32 bits: about 40 bytes a token at four orders.

    Attributes:
        tokens (`array`): the text.
        max_ngram_size (`int`): longest n-gram that is looked up.
        common (`TopCounts`): tokens by the number of different tokens that they follow (the lowest order of
            Kneser-Ney smoothing): the best prediction after a context that was never seen.
    """

    def __init__(self, max_ngram_size: int) -> None:
        self.tokens = array("i")
        self.max_ngram_size = max_ngram_size
        self.common = TopCounts(NUM_COMMON)
        self.num_orders = max(2, max_ngram_size)  # pairs tell which tokens a token has followed
        self._older = array("i")  # (tokens, orders): for each position the one before it, 0 for none
        self._newest = hashing.table(FIRST_SLOTS)  # of every n-gram, its newest end
        self._num_ngrams = 0

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    @property
    def arrays(self) -> "tuple[array[int], array[int], array[int], int]":
        """The text, the links, the table and the number of orders, as the compiled core takes them."""
        return self.tokens, self._older, self._newest, self.num_orders

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens after the text."""
        rest = iter(tokens)
        while piece := tuple(islice(rest, ADDED_AT_ONCE)):
            self._add(piece)

    def places(self, ngram: Sequence[int], limit: int) -> list[int]:
        """At most `limit` positions that follow an occurrence of `ngram`, newest first; the text's end is none."""
        if native.core is not None:
            return native.core.places(*self.arrays, tuple(ngram), limit)
        size, text_length = len(ngram), len(self.tokens)
        found: list[int] = []
        place = hashing.newest(self._newest, self.tokens, self.num_orders, ngram)
        while place and len(found) < limit:
            if place < text_length:
                found.append(place)
            place = self._older[(place - 1) * self.num_orders + size - 1]
        return found

    def match_length(self, place: int, context: Sequence[int], limit: int) -> int:
        """How many of the last tokens of `context` also stand in front of `place`, counted up to `limit`."""
        text, end = self.tokens, len(context)
        longest = min(limit, place, end)
        length = 0
        while length < longest and text[place - 1 - length] == context[end - 1 - length]:
            length += 1
        return length

    def _add(self, tokens: Sequence[int]) -> None:
        """Add tokens; the table has room for their n-grams."""
        most = self._num_ngrams + len(tokens) * self.num_orders
        if 3 * most > 2 * len(self._newest):
            larger = hashing.table_for(3 * most // 2 + 1)
            move = hashing.move if native.core is None else native.core.move
            move(self.tokens, self._newest, larger, self.num_orders)
            self._newest = larger
        start = len(self.tokens)
        self._older.frombytes(bytes(len(tokens) * self.num_orders * self._older.itemsize))
        self.tokens.extend(tokens)
        link = hashing.link if native.core is None else native.core.link
        added, followers = link(*self.arrays, start)
        self._num_ngrams += added
        for token in followers:
            self.common.add(token)
