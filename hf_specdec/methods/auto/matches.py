"""Places in earlier text that match the end of a growing draft, followed token by token.

A *match* is a place and how many tokens in front of it agree with the context. When the context grows by a token, the
matches that hold this token move on by one, and only where few are left a short one is looked up anew. So a node of a
tree costs a walk over its parent's matches, whatever the length of the text. Knows nothing about models or trees.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hf_specdec.methods.common.ngram.index import NgramIndex
from hf_specdec.methods.common.ngram.pool import NgramPool

NUM_PLACES = 16  # newest occurrences of an n-gram looked at
MAX_MATCH = 8  # tokens in front of a place compared; more say nothing new
FEW = 4  # matches below which a context is looked up anew
VOTES = [float(size * size) for size in range(MAX_MATCH + 1)]  # of a match by its size

Match = tuple[Sequence[int], int, int]  # text, place in it, matching tokens in front of the place, at most MAX_MATCH
Followers = dict[int, list[Match]]  # matches by the token that follows them


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
        self._index, self._path = index, path
        self._own = _by_follower(own, path, len(index.tokens)) if own else {}
        self._pooled = _by_follower(pooled, (), -1) if pooled else {}

    @classmethod
    def of_text(cls, index: NgramIndex, pool: NgramPool | None = None) -> "Matches":
        """Matches of the text's end in the text itself and in those of `pool`."""
        context = index.tokens[-MAX_MATCH:]
        return cls(index, (), _found(index, context), [] if pool is None else _found(pool, context))

    def after(self, token: int) -> "Matches":
        """Matches of this context followed by `token`."""
        own, pooled = _moved(self._own.get(token)), _moved(self._pooled.get(token))
        if len(own) < FEW and self._index.max_ngram_size:
            text, known = self._index.tokens, [place for _, place, _ in own]
            own += [(text, place, 1) for place in self._index.places((token,), NUM_PLACES) if place not in known]
        return Matches(self._index, (*self._path, token), own, pooled)

    def own_votes(self) -> Votes:
        """What followed the matches in this text; after its end stand the drafted tokens."""
        return _votes(self._own)

    def pooled_votes(self) -> Votes:
        """What followed the matches in earlier texts."""
        return _votes(self._pooled)


def _found(source: NgramIndex | NgramPool, context: Sequence[int]) -> list[Match]:
    """The newest places after every n-gram that ends the context, each once."""
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


def _moved(matches: list[Match] | None) -> list[Match]:
    """Matches one token further."""
    if matches is None:
        return []
    return [(tokens, place + 1, size + 1 if size < MAX_MATCH else size) for tokens, place, size in matches]


def _by_follower(matches: list[Match], path: tuple[int, ...], end: int) -> Followers:
    """Matches by the token that follows; in the text of length `end` the drafted `path` stands after its end."""
    found: Followers = {}
    for match in matches:
        text, place, _ = match
        is_drafted = 0 <= end <= place
        token = path[place - end] if is_drafted else text[place] if place < len(text) else -1
        if token >= 0:  # else the end of an earlier text
            if token in found:
                found[token].append(match)
            else:
                found[token] = [match]
    return found


def _votes(followers: Followers) -> Votes:
    """Count the matches of each token by their sizes."""
    if not followers:
        return NO_VOTES
    votes: dict[int, float] = {}
    total, longest = 0.0, 0
    for token, matches in followers.items():
        count = 0.0
        for _, _, size in matches:
            count += VOTES[size]
            if size > longest:
                longest = size
        votes[token] = count
        total += count
    return Votes(votes, total, longest)


NO_VOTES = Votes({}, 0.0, 0)
