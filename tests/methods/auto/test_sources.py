"""One probability a candidate, from all sources, corrected by every token of the text."""

import numpy as np
import pytest
import torch

from hf_specdec.common.tree import TreeBuilder
from hf_specdec.methods.auto.recycled_logits import Entry, log_odds
from hf_specdec.methods.auto.search import MOST_TRUST, Search, Sources
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.ngrams import NgramIndex
from tests.native.recycled import put

LIKELY: Entry = ((30, 31), (12.0, 5.0))
UNSURE: Entry = ((30, 31), (9.0, 5.0))  # below the bound of probabilities
PLENTY = 1_000


@pytest.fixture
def memory() -> SpecMemory:
    return SpecMemory(1_000, 1_000)


@pytest.fixture
def sources(memory: SpecMemory) -> Sources:
    return Sources(memory, is_sampled=False)


def index_of(tokens: list[int]) -> NgramIndex:
    index = NgramIndex(4)
    index.extend(tokens)
    return index


def ask(sources: Sources, tokens: list[int], drafted: Entry | None = None) -> dict[int, float]:
    """The probability of each token that may follow a text."""
    search = Search(sources, index_of(tokens), max_depth=1)
    if drafted is not None:
        search.score(0, drafted)
    likeliest = search.likeliest(PLENTY, 0.0)
    return dict(zip(likeliest.tokens[1:], likeliest.probabilities[1:], strict=True))


def learn(sources: Sources, tokens: list[int], token: int, verified: list[int]) -> None:
    """What comes after a text, of which some tokens were verified."""
    search = Search(sources, index_of(tokens), max_depth=1)
    search.likeliest(PLENTY, 0.0)
    builder = TreeBuilder(tokens[-1])
    for drafted in verified:
        builder.add(0, drafted)
    search.follow(builder.build(), [token])


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_at_most_one_together(seed: int, memory: SpecMemory, sources: Sources) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, (60,), generator=generator).tolist()
    memory.pool.add(tokens[::-1])
    put(memory.recycled, tuple(tokens[-3:]), (tuple(range(8)), (14.0,) * 8))
    shares = ask(sources, tokens, (tuple(range(8)), (14.0,) * 8))
    assert len(shares) == 8
    assert sum(shares.values()) <= 1.0 + 1e-9
    assert all(0.0 < probability < 1.0 for probability in shares.values())


def test_every_source_names_candidates(memory: SpecMemory, sources: Sources) -> None:
    memory.pool.add([6, 7, 20])
    put(memory.recycled, (5, 6, 7), LIKELY)
    assert ask(sources, [6, 7, 10, 6, 7], ((40,), (13.0,))).keys() == {10, 20, 30, 31, 40}


def test_before_anything_is_learned_a_greedy_target_is_expected_to_be_surer_than_its_draft(memory: SpecMemory) -> None:
    """Likely tokens are accepted more often than the draft says, unlikely ones less; drawn ones as often as it says."""
    shares = np.array([0.7, 0.05])
    greedy, sampled = (
        ask(Sources(memory, is_sampled=drawn), [1, 2, 3], ((40, 41), log_odds(shares).tolist()))
        for drawn in (False, True)
    )
    assert greedy[40] > shares[0] + 0.1
    assert greedy[41] < shares[1] / 2
    assert [sampled[40], sampled[41]] == pytest.approx(shares, abs=0.05)


def test_without_a_pool_the_text_alone_speaks(memory: SpecMemory) -> None:
    memory.pool.add([6, 7, 20])
    shares = ask(Sources(memory, is_sampled=False, uses_texts=False), [6, 7, 10, 6, 7])
    assert shares.keys() == {6, 7, 10}
    assert shares[10] == max(shares.values())


def test_common_tokens_stand_in_only_where_nothing_is_recycled(memory: SpecMemory, sources: Sources) -> None:
    tokens = [4, 5, 6, 5, 7, 5, 8, 5, 9]
    assert 5 in ask(sources, tokens)
    put(memory.recycled, (9,), LIKELY)
    assert ask(sources, tokens).keys() == {30, 31}


def test_a_draft_model_is_believed_more_than_what_is_recycled(memory: SpecMemory, sources: Sources) -> None:
    put(memory.recycled, (5, 6, 7), LIKELY)
    shares = ask(sources, [5, 6, 7], ((40,), (12.0,)))
    assert shares[40] > shares[30]


@pytest.mark.parametrize(("token", "rises"), [(30, True), (99, False)])
def test_it_learns_from_what_comes_drafted_or_not(
    token: int, rises: bool, memory: SpecMemory, sources: Sources
) -> None:
    put(memory.recycled, (5, 6, 7), UNSURE)
    before = ask(sources, [5, 6, 7])[30]
    for _ in range(60):
        learn(sources, [5, 6, 7], token, [])
    assert (ask(sources, [5, 6, 7])[30] > before) == rises
    assert sum(memory.greedy.expected) == sum(memory.greedy.accepted) == 0.0


def test_only_verified_candidates_are_counted_for_the_correction(memory: SpecMemory, sources: Sources) -> None:
    """Before anything was counted, a probability is corrected by nothing."""
    put(memory.recycled, (5, 6, 7), UNSURE)
    said = ask(sources, [5, 6, 7])[30]
    learn(sources, [5, 6, 7], 30, [30, 99])
    assert sum(memory.greedy.expected) == pytest.approx(said)
    assert sum(memory.greedy.accepted) == 1.0


def test_greedy_and_sampled_texts_teach_apart(memory: SpecMemory) -> None:
    put(memory.recycled, (5, 6, 7), LIKELY)
    learn(Sources(memory, is_sampled=True), [5, 6, 7], 99, [30])
    assert sum(memory.sampled.seen) == 1
    assert sum(memory.greedy.seen) == 0


def test_nothing_known_is_no_candidate(sources: Sources) -> None:
    assert ask(sources, [5]) == {}
    learn(sources, [5], 4, [])


def test_a_text_unlike_the_others_is_trusted_less(memory: SpecMemory) -> None:
    """Of one text alone: another that begins afterwards starts with full trust."""
    put(memory.recycled, (5, 6, 7), LIKELY)
    sources = Sources(memory, is_sampled=True)
    before = ask(sources, [5, 6, 7])[30]
    for _ in range(5):
        learn(sources, [5, 6, 7], 99, [30])
    assert sources.trust < 0.8
    assert ask(sources, [5, 6, 7])[30] < 0.5 * before
    assert Sources(memory, is_sampled=True).trust == 1.0
    for _ in range(100):
        learn(sources, [5, 6, 7], 30, [30])
    assert sources.trust > 0.9


def test_a_text_that_keeps_more_than_it_promised_is_trusted_more(memory: SpecMemory) -> None:
    put(memory.recycled, (5, 6, 7), LIKELY)
    sources, trusts = Sources(memory, is_sampled=True), []
    for _ in range(30):
        learn(sources, [5, 6, 7], 31, [31])  # the one held unlikely
        trusts.append(sources.trust)
    assert 1.1 < max(trusts) <= MOST_TRUST
    assert sum(ask(sources, [5, 6, 7]).values()) <= 1.0 + 1e-9
