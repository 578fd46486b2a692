"""Places in earlier text that match the end of a growing draft, followed token by token.

A *match* is a place and how many tokens in front of it agree with the context. When the context grows by a token, the
matches that hold this token move on by one, and only where few are left a short one is looked up anew. So a node of a
tree costs a walk over its parent's matches, whatever the length of the text. Knows nothing about models or trees.

    matches = Matches.of_text(index, pool)
    matches.own_votes()       # what followed in this text
    matches.after(token)      # the matches of the same context with `token` behind it
"""

from collections.abc import Sequence
from typing import NamedTuple

from hf_specdec.methods.ngram.index import NgramIndex
from hf_specdec.methods.ngram.pool import NgramPool

__all__ = ["Matches", "Votes"]

NUM_PLACES = 16  # newest occurrences of an n-gram looked at
MAX_MATCH = 8  # tokens in front of a place compared; more say nothing new
FEW = 4  # matches below which a context is looked up anew

Match = tuple[Sequence[int], int, int]  # text, place in it, matching tokens in front of the place


class Votes(NamedTuple):
    """Votes for the next token: a match of m tokens has m * m.

    Attributes:
        by_token (`dict[int, float]`): votes of each token.
        total (`float`): their sum.
        longest (`int`): tokens of the longest match, 0 without one.
    """

    by_token: dict[int, float]
    total: float
    longest: int


class Matches:
    """Matches of one context: the text of `index`, then the drafted tokens `path`.

    Args:
        own, pooled: matches in this text and in earlier ones.
    """

    __slots__ = ("_index", "_own", "_path", "_pooled")

    def __init__(self, index: NgramIndex, path: tuple[int, ...], own: list[Match], pooled: list[Match]) -> None:
        self._index, self._path, self._own, self._pooled = index, path, own, pooled

    @classmethod
    def of_text(cls, index: NgramIndex, pool: NgramPool | None = None) -> "Matches":
        """Matches of the text's end in the text itself and in those of `pool`."""
        context = index.tokens[-MAX_MATCH:]
        return cls(index, (), _found(index, context), [] if pool is None else _found(pool, context))

    def after(self, token: int) -> "Matches":
        """Matches of this context followed by `token`."""
        text, path = self._index.tokens, self._path
        end = len(text)
        own: list[Match] = [
            (text, place + 1, size + 1)
            for _, place, size in self._own
            if (text[place] if place < end else path[place - end]) == token
        ]
        pooled = [(tokens, place + 1, size + 1) for tokens, place, size in self._pooled if tokens[place] == token]
        if len(own) < FEW and self._index.max_ngram_size:
            known = {place for _, place, _ in own}
            own += [(text, place, 1) for place in self._index.places((token,), NUM_PLACES) if place not in known]
        return Matches(self._index, (*path, token), own, pooled)

    def own_votes(self) -> Votes:
        """What followed the matches in this text; behind its end stand the drafted tokens."""
        text, path = self._index.tokens, self._path
        end = len(text)
        return _votes([(text[place] if place < end else path[place - end], size) for _, place, size in self._own])

    def pooled_votes(self) -> Votes:
        """What followed the matches in earlier texts."""
        return _votes([(tokens[place], size) for tokens, place, size in self._pooled])


def _found(source: NgramIndex | NgramPool, context: Sequence[int]) -> list[Match]:
    """The newest places behind every n-gram that ends the context, each once."""
    found: list[Match] = []
    seen: set[tuple[int, int]] = set()
    for size in range(min(source.max_ngram_size, len(context)), 0, -1):
        ngram = context[-size:]
        if isinstance(source, NgramIndex):
            places = [(source, place) for place in source.places(ngram, NUM_PLACES)]
        else:
            places = source.search(ngram, limit=NUM_PLACES)
        for index, place in places:
            if (id(index), place) not in seen:
                seen.add((id(index), place))
                found.append((index.tokens, place, index.match_length(place, context, MAX_MATCH)))
    return found


def _votes(followers: list[tuple[int, int]]) -> Votes:
    """Count (token, size of the match); a token below 0 is the end of an earlier text."""
    votes: dict[int, float] = {}
    total, longest = 0.0, 0
    for token, size in followers:
        if token >= 0:
            vote = float(size * size if size < MAX_MATCH else MAX_MATCH * MAX_MATCH)
            votes[token] = votes.get(token, 0.0) + vote
            total += vote
            longest = max(longest, size)
    return Votes(votes, total, longest)
