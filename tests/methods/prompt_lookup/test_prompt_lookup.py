"""Prompt lookup drafts what stood in the text before, within its budgets, at the same work for any length of text."""

import random
from typing import Any

import pytest

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.ngrams import NgramPool
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from tests.helpers.drafts import drafted_by, learned


def drafter_of(text: list[int], pool: NgramPool | None = None, **fields: Any) -> PromptLookupDrafter:
    drafter = PromptLookupDrafter(PromptLookupConfig(**fields), pool)
    drafter.begin(text)
    return drafter


def drafted(text: list[int], budget: int = 100, pool: NgramPool | None = None, **fields: Any) -> list[int]:
    """The first branch that is drafted behind `text`."""
    return drafted_by(drafter_of(text, pool, **fields), budget).first_branch()


def random_text(seed: int, length: int, num_tokens: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(num_tokens) for _ in range(length)]


# TensorRT-LLM's worked example: a pattern of two tokens, then of one, then nothing; and which of several places.
PATTERNS: dict[str, tuple[list[int], list[int]]] = {
    "the longest": ([1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 50, 51, 52, 53, 3, 4], [5, 6, 7, 8]),
    "a shorter one": ([1, 2, 4, 50, 51, 52, 53, 60, 3, 4], [50, 51, 52, 53]),
    "none": ([1, 2, 3, 4], []),
    "the newest of equal ones": ([9, 3, 4, 5, 5, 5, 5, 8, 3, 4, 6, 6, 6, 6, 7, 3, 4], [6, 6, 6, 6]),
    "an older one with more in front": ([2, 3, 4, 5, 5, 5, 5, 8, 3, 4, 6, 6, 6, 6, 2, 3, 4], [5, 5, 5, 5]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_draft_is_what_followed_the_best_place(name: str) -> None:
    text, expected = PATTERNS[name]
    assert drafted(text, max_draft_len=4, max_matching_ngram_size=2) == expected


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_repetition_is_continued_to_the_full_length(period: int) -> None:
    """The only places lie closer to the end than the draft is long: the copy goes on into itself."""
    cycle = list(range(10, 10 + period))
    assert drafted(cycle + cycle, max_draft_len=8, draft_len_per_match=None) == (cycle * 8)[:8]


@pytest.mark.parametrize("matching", [1, 2, 3])
def test_a_short_match_is_followed_less_far(matching: int) -> None:
    """At most `draft_len_per_match` tokens for each token that matches; `None` lifts the limit."""
    context = list(range(50, 50 + matching))
    text = [9, *context, *range(20), 8, *context]
    assert drafted(text, max_draft_len=10, draft_len_per_match=2) == list(range(2 * matching))
    assert drafted(text, max_draft_len=10, draft_len_per_match=None) == list(range(10))


@pytest.mark.parametrize(
    ("token_cost", "expected"), [(0.3, [1, 1, 2]), (0.045, [4, 8, 10]), (0.015, [8, 10, 10]), (0.0, [10, 10, 10])]
)
def test_a_match_is_followed_as_far_as_its_tokens_pay(token_cost: float, expected: list[int]) -> None:
    """By the number of tokens that match; the longer, the surer that it goes on."""
    lengths = []
    for matching in (1, 2, 3):
        end = list(range(100, 100 + matching))
        drafter = PromptLookupDrafter(PromptLookupConfig(), token_cost=lambda num_rows, num_nodes: token_cost)
        drafter.begin([50, *end, *range(20), 51, *end])
        lengths.append(drafted_by(drafter, 10).num_draft_tokens)
    assert lengths == expected


def test_a_match_is_followed_less_far_the_more_rows_share_a_forward() -> None:
    """By the rows of the next forward: rows leave a batch."""
    drafter = PromptLookupDrafter(PromptLookupConfig(), token_cost=lambda num_rows, num_nodes: 0.045 * num_rows**0.5)
    drafter.begin([50, 100, 101, *range(20), 51, 100, 101])
    lengths = []
    for num_rows in (8, 2, 1):
        lengths.append(drafted_by(drafter, 10, num_rows=num_rows).num_draft_tokens)
    assert lengths == [1, 5, 8]


def test_a_match_is_followed_less_far_where_few_drafts_were_accepted() -> None:
    """And as far as at first, once they are accepted again."""
    drafter = drafter_of(random_text(0, 60))

    def step(is_accepted: bool) -> int:
        tree = drafted_by(drafter, 10)
        tokens = tree.first_branch()
        following = [*tokens, tokens[-1]] if is_accepted else [(tokens[0] + 1) % 5 if tokens else 0]
        learned(drafter, tree, None, following)
        return len(tokens)

    refused = [step(is_accepted=False) for _ in range(40)]
    assert refused[0] >= 4
    assert sum(refused[-20:]) < 20
    accepted = [step(is_accepted=True) for _ in range(40)]
    assert accepted[-1] == 10


@pytest.mark.parametrize(("jump", "expected"), [(0.0, [4, 10]), (0.4, [4, 10]), (0.5, [0, 10]), (1.6, [0, 0])])
def test_nothing_is_drafted_where_all_of_it_gains_less_than_drafting_at_all_costs(
    jump: float, expected: list[int]
) -> None:
    """A match of one token is expected to bring 0.44 tokens beyond what they cost, one of three 1.5."""
    lengths = []
    for matching in (1, 3):
        end = list(range(100, 100 + matching))
        drafter = PromptLookupDrafter(PromptLookupConfig(), jump=lambda num_rows: jump if num_rows == 1 else 0.0)
        drafter.begin([50, *end, *range(20), 51, *end])
        lengths.append(drafted_by(drafter, 10).num_draft_tokens)
        assert drafted_by(drafter, 10, num_rows=2).num_draft_tokens > 0
    assert lengths == expected


def test_a_prompt_of_one_token_drafts_the_root_alone() -> None:
    drafter = drafter_of([7])
    assert drafted_by(drafter, 10) == DraftTree.chain(7)
    learned(drafter, DraftTree.chain(7), None, [7, 7])
    assert drafted_by(drafter, 10).first_branch()[0] == 7


@pytest.mark.parametrize("seed", range(20))
def test_chains_stay_within_budget_and_length(seed: int) -> None:
    """No more tokens than asked for or configured."""
    most = random.Random(seed).randrange(1, 8)
    drafter = drafter_of(random_text(seed, 200), max_draft_len=most)
    for budget in (0, 1, 2, 5, 100):
        tree = drafted_by(drafter, budget)
        assert tree.is_chain
        assert tree.num_draft_tokens <= min(budget, most)
    assert drafted_by(drafter, 0) == DraftTree.chain(tree.tokens[0])


def test_an_earlier_text_is_drafted_from_once_it_has_ended() -> None:
    pool = NgramPool(max_tokens=1000)
    first = drafter_of([1, 2], pool)
    learned(first, DraftTree.chain(2), None, [3, 4, 5])
    assert drafted([9, 1, 2], pool=pool) == []
    first.end()
    assert drafted([9, 1, 2], pool=pool)[:3] == [3, 4, 5]


def test_this_text_comes_before_earlier_ones() -> None:
    pool = NgramPool(max_tokens=1000)
    pool.add([1, 2, 30, 31, 32])
    assert drafted([1, 2, 3, 4, 1, 2], pool=pool, max_draft_len=2) == [3, 4]


def test_no_draft_runs_across_the_end_of_an_earlier_text() -> None:
    pool = NgramPool(max_tokens=1000)
    pool.add([1, 2, 3])
    pool.add([7, 8, 9])
    tree = drafted_by(drafter_of([5, 1, 2], pool), 32)
    assert tree.first_branch()[0] == 3
    assert 7 not in tree.tokens


def test_ending_twice_stores_once() -> None:
    """Also before anything has begun."""
    pool = NgramPool(max_tokens=1000)
    PromptLookupDrafter(PromptLookupConfig(), pool).end()
    assert len(pool) == 0
    drafter = drafter_of([1, 2, 3], pool)
    drafter.end()
    held = len(pool)
    drafter.end()
    assert len(pool) == held > 0
