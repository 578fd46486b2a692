"""Lookahead's configuration, pool and drafter do what the paper says, and touch no one's random numbers."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.methods.lookahead.config import LookaheadConfig, max_draft_len
from hf_specdec.methods.lookahead.drafter import MAX_KEYS, LookaheadDrafter, TailPool
from tests.helpers.drafts import drafted_by, learned

VOCAB_SIZE = 50
SIZES = ("window_size", "ngram_size", "verification_set_size")
PLENTY = 1000


def config(sizes: Sequence[int], **fields: Any) -> LookaheadConfig:
    return LookaheadConfig(**dict(zip(SIZES, sizes, strict=True)), **fields)


def logits_for(tokens: Sequence[int]) -> torch.Tensor:
    """Rows whose argmax is `tokens`; the rest is noise."""
    rows = torch.rand(len(tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 2.0
    return rows


def successor(token: int) -> int:
    """What the target of these tests says after a token, whatever stands before: a round through all tokens."""
    return (token + 7) % VOCAB_SIZE


def step(drafter: LookaheadDrafter, budget: int = PLENTY) -> DraftTree:
    """One step of a target that goes by `successor`, all that is right accepted; returns what was drafted."""
    tree = drafted_by(drafter, budget)
    accepted, node = [successor(tree.tokens[0])], tree.child(0, successor(tree.tokens[0]))
    while node is not None:
        accepted.append(successor(tree.tokens[node]))
        node = tree.child(node, accepted[-1])
    learned(drafter, tree, logits_for([successor(token) for token in tree.column_tokens]), accepted)
    return tree


class WindowDrafter(LookaheadDrafter):
    """Drafts what the window found alone: the text's n-grams are not pooled."""

    def _extend(self, tokens: Sequence[int]) -> None:
        self._root = tokens[-1]
        self._window.set_root(self._root)


def begun(
    sizes: Sequence[int],
    prompt: Sequence[int] = (3, 4, 5, 6, 7, 8),
    drafter_class: type[LookaheadDrafter] = LookaheadDrafter,
) -> LookaheadDrafter:
    """A drafter that has seen the prompt and the first token after it, as the loop shows them."""
    drafter = drafter_class(config(sizes))
    drafter.begin(prompt)
    first = successor(prompt[-1])
    learned(drafter, DraftTree.chain(prompt[-1]), logits_for([first]), [first])
    return drafter


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The branches of a tree, root left out."""
    leaves = [node for node in range(1, len(tree)) if not tree.children(node)]
    return {tuple(tree.tokens[node] for node in tree.path(leaf)[1:]) for leaf in leaves}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 1, 0), 0), ((1, 2, 1), 1), ((2, 2, 1), 2), ((7, 5, 7), 55), ((7, 7, 7), 83), ((15, 5, 15), 119)],
)
def test_max_draft_len_is_what_a_step_computes_at_most(sizes: tuple[int, int, int], expected: int) -> None:
    assert max_draft_len(*sizes) == config(sizes).max_draft_len == expected
    window, ngram, candidates = sizes
    assert expected == (window * (ngram - 1) - 1 if ngram > 1 else 0) + candidates * (ngram - 1)
    assert config(sizes).node_budget == candidates * (ngram - 1)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ((0, 5, 7), "window_size"),
        ((7, 0, 7), "ngram_size"),
        ((7, 5, 0), "verification_set_size"),
        ((7, 5, -1), "verification_set_size"),
        ((2, 1, 0), "window_size"),
        ((1, 1, 1), "verification_set_size"),
        ((1, 1, False), "verification_set_size"),
        ((7.0, 5, 7), "window_size"),
        ((7, "5", 7), "ngram_size"),
        ((7, 5, None), "verification_set_size"),
        ((True, 1, 0), "window_size"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(sizes: tuple[Any, ...], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(sizes)
    assert error.value.field == field
    assert error.value.value is sizes[SIZES.index(field)]
    assert error.value.remedy


@pytest.mark.parametrize(
    "value",
    [
        [9, 4, 2],
        (9, 4, 2),
        "[9,4,2]",
        {"window_size": 9, "ngram_size": 4, "verification_set_size": 2},
        {"windows_size": 9, "ngram_size": 4, "verification_set_size": 2},
        {"max_window_size": 9, "max_ngram_size": 4, "max_verification_set_size": 2},
    ],
)
def test_all_ways_to_write_the_sizes_mean_the_same(value: Any) -> None:
    assert LookaheadConfig.parse(value) == config((9, 4, 2))


@pytest.mark.parametrize("value", [[], [7], [7, 5], [7, 5, 7, 0], "[7, 5]"])
def test_the_list_form_needs_all_three_sizes(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"`lookahead_config` must have 3 entries, \[window_size, ngram_size, verif"):
        LookaheadConfig.parse(value, "lookahead_config")


@pytest.mark.parametrize("name", SIZES)
def test_a_request_stays_within_what_the_model_reserves(name: str) -> None:
    reserved = config((7, 5, 7))
    for sizes in ((7, 5, 7), (2, 2, 1), (1, 1, 0)):
        config(sizes).check_within(reserved)
    excess = LookaheadConfig(**{name: getattr(reserved, name) + 1})
    with pytest.raises(ConfigError, match="as reserved for the model") as error:
        excess.check_within(reserved, "lookahead_config")
    assert error.value.field == f"lookahead_config.{name}"
    assert error.value.value == getattr(excess, name)


def tails_of(pool: TailPool, key: int) -> list[tuple[int, ...]]:
    return [tail for tail, _ in pool.entries(key)]


def test_the_pool_keeps_the_tails_and_keys_used_last() -> None:
    pool = TailPool(ngram_size=3, max_tails=2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert tails_of(pool, 1) == [(6, 7), (2, 3)]
    assert tails_of(pool, 2) == []
    for key in (8, 1, *range(100, 100 + MAX_KEYS - 1)):
        pool.add((key, 2, 2))
    assert tails_of(pool, 8) == []
    assert tails_of(pool, 1) == [(2, 2), (6, 7)]


def test_the_pool_takes_every_ngram_of_a_text() -> None:
    generator = random.Random(3)
    text = [4, *[generator.randrange(4) for _ in range(200)], 5]
    pool = TailPool(ngram_size=3, max_tails=PLENTY)
    pool.add_text(text)
    expected = {tuple(text[start : start + 3]) for start in range(200)}
    assert {(key, *tail) for key in range(6) for tail in tails_of(pool, key)} == expected
    assert tails_of(pool, text[-3])[0] == tuple(text[-2:])


def test_candidates_share_their_prefixes_most_recently_used_first() -> None:
    drafter = LookaheadDrafter(config((2, 4, 3)))
    drafter.begin([1, 2, 3, 4, 1, 2, 3, 5, 1, 9, 9, 9, 1])
    tree = drafted_by(drafter, PLENTY)
    assert tree.tokens == (1, 9, 9, 9, 2, 3, 5, 4)
    assert tree.parents == (-1, 0, 1, 2, 0, 4, 5, 5)


def test_at_most_g_candidates_are_verified() -> None:
    drafter = LookaheadDrafter(config((2, 3, 2)))
    drafter.begin([1, 2, 3, 1, 2, 5, 1, 2, 7, 1])
    assert paths(drafted_by(drafter, PLENTY)) == {(2, 7), (2, 5)}


@pytest.mark.parametrize("budget", range(8))
def test_the_budget_bounds_the_drafted_tokens(budget: int) -> None:
    drafter = LookaheadDrafter(config((2, 3, 4)))
    drafter.begin([1, 2, 3, 1, 4, 5, 1, 6, 7, 1])
    tree = drafted_by(drafter, budget)
    assert tree.tokens == (1, 6, 7, 4, 5, 2, 3)[: budget + 1]
    assert (tree.extra is None) == (budget == 0)


def test_the_text_s_ngrams_are_pooled_across_steps() -> None:
    drafter = LookaheadDrafter(config((2, 4, 3)))
    drafter.begin([1, 2])
    for accepted in ([3], [4, 5], [6, 1]):
        learned(drafter, drafted_by(drafter, 0), None, accepted)
    assert paths(drafted_by(drafter, PLENTY)) == {(2, 3, 4)}
    assert tails_of(drafter._pool, 1) == [(2, 3, 4)]


def test_what_the_window_finds_is_drafted_and_accepted() -> None:
    """The window's n-grams are right here, so in time whole tails are accepted, with the token after them."""
    drafter = begun((5, 4, 5), drafter_class=WindowDrafter)
    lengths = []
    for _ in range(80):
        tree = step(drafter)
        emitted, token = 1, successor(tree.tokens[0])
        while token != drafter._window.levels[0][0]:
            emitted, token = emitted + 1, successor(token)
        lengths.append(emitted)
    assert lengths[:3] == [1, 1, 1]
    assert lengths[-20:] == [4] * 20
