"""Matches against a literal reference that compares every place with the context, token by token."""

import pytest
import torch

from hf_specdec.methods.auto.search import Sources
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.ngrams import NgramIndex, NgramPool
from tests.native.oracle import PythonSearch, _Node

Places = list[tuple[int, int]]  # place, matching tokens in front of it
Votes = dict[int, float]


class Context:
    """Votes for what follows a text and drafted tokens after it."""

    def __init__(self, tokens: list[int], pool: NgramPool | None = None) -> None:
        index, memory = NgramIndex(4), SpecMemory(1_000, 10)
        index.extend(tokens)
        memory.pool = pool or memory.pool
        self.search = PythonSearch(Sources(memory, is_sampled=False), index)
        self.node = self.search._nodes[0]

    def after(self, *tokens: int) -> "Context":
        other = object.__new__(Context)
        other.search, other.node = self.search, self.node
        for token in tokens:
            other.node = _Node(0, token, other.node)
        return other

    def of_text(self) -> Votes:
        return self.votes(0)

    def pooled(self) -> Votes:
        return self.votes(1)

    def votes(self, which: int) -> Votes:
        counts: Votes = {}
        for text, place, size in self.search._matches_of(self.node)[which]:
            token = self.search._follower(self.node, text, place)
            if token >= 0:
                counts[token] = counts.get(token, 0.0) + size * size
        return counts


def text(seed: int, length: int = 40, alphabet: int = 6) -> list[int]:
    return torch.randint(alphabet, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def num_equal(tokens: list[int], place: int, context: list[int]) -> int:
    """How many of the last 16 tokens of `context` stand in front of `place`, up to the second that does not."""
    agree = [token == other for token, other in zip(reversed(tokens[:place]), reversed(context[-16:]), strict=False)]
    ends = [back for back, agrees in enumerate(agree) if not agrees]
    return sum(agree[: ends[1]] if len(ends) > 1 else agree)


def all_places(tokens: list[int], context: list[int]) -> Places:
    """Every place but the end whose token in front is the context's last."""
    places = [place for place in range(1, len(tokens)) if tokens[place - 1] == context[-1]]
    return [(place, num_equal(tokens, place, context)) for place in places]


def followed(tokens: list[int], path: list[int], places: Places, token: int, *, renews: bool) -> Places:
    """The places after `token`: those that hold it move on; where fewer than four are left, new ones join."""
    whole = tokens + path
    kept = [(place + 1, size + 1) for place, size in places if whole[place] == token]
    if renews and len(kept) < 4:
        places_kept = {place for place, _ in kept}
        kept += [(p, 1) for p in range(1, len(tokens)) if tokens[p - 1] == token and p not in places_kept]
    return kept


def votes(tokens: list[int], places: Places) -> Votes:
    by_token: Votes = {}
    for place, size in places:
        if tokens[place] >= 0:
            by_token[tokens[place]] = by_token.get(tokens[place], 0.0) + min(size, 16) ** 2
    return by_token


@pytest.mark.parametrize("seed", range(12))
def test_matches_are_those_found_by_brute_force(seed: int) -> None:
    tokens = text(seed) + text(seed)[:7] * (seed % 2)
    context, places = Context(tokens), all_places(tokens, tokens)
    assert context.of_text() == votes(tokens, places)
    path: list[int] = []
    for token in text(seed + 100, 6):
        context, places = context.after(token), followed(tokens, path, places, token, renews=True)
        path.append(token)
        assert context.of_text() == votes(tokens + path, places)


@pytest.mark.parametrize("seed", range(6))
def test_matches_in_earlier_texts_are_those_found_by_brute_force(seed: int) -> None:
    earlier = [text(seed + 10, 15), text(seed + 20, 15)]
    pool = NgramPool(1_000)
    for tokens_before in earlier:
        pool.add(tokens_before)
    joined = [*earlier[0], -1, *earlier[1], -1]
    tokens = text(seed, 12)
    context = Context(tokens, pool)
    places = [(place, size) for place, size in all_places(joined, tokens) if joined[place] != -1]
    assert context.pooled() == votes(joined, places)
    for token in text(seed + 100, 4):
        context, places = context.after(token), followed(joined, [], places, token, renews=False)
        assert context.pooled() == votes(joined, places)


def test_a_match_runs_on_into_the_draft_itself() -> None:
    """A text that repeats with period two is continued far beyond its end."""
    context = Context([1, 2, 1, 2, 1])
    for token in (2, 1, 2, 1, 2, 1, 2):
        assert context.of_text().keys() == {token}
        context = context.after(token)
