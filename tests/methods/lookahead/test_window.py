"""The window stands where the paper puts it, sees what it should, and moves on one position a step."""

import itertools
import random

import pytest
import torch

from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.drafter import JacobiWindow, LookaheadDrafter, window_places
from tests.helpers.drafts import drafted_by, learned
from tests.methods.lookahead.test_lookahead import PLENTY, WindowDrafter, begun, config, logits_for, step

SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (5, 1), (3, 4), (7, 4), (4, 6)]
PROMPT = [3, 4, 5, 6, 7, 8]


def may_see(reader: tuple[int, int], other: tuple[int, int]) -> bool:
    """The paper's rule for two window tokens, each (level, column); level 0, column 0 is the current token."""
    level, column = reader
    other_level, other_column = other
    if other_level == 0:
        return other_column <= column
    return other_column == column and other_level <= level


@pytest.mark.parametrize(("width", "num_levels"), SHAPES)
def test_every_pair_of_window_tokens_sees_one_another_as_in_the_paper(width: int, num_levels: int) -> None:
    places = list(itertools.product(range(num_levels), range(width)))
    depths, visible = window_places(width, num_levels)
    assert visible.shape == (len(places) - 1, len(places))
    for row, reader in enumerate(places[1:]):
        assert depths[row] == reader[0] + reader[1]
        for column, other in enumerate(places):
            assert visible[row, column] == may_see(reader, other), (reader, other)


def window_of(drafter: LookaheadDrafter) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, drafter._window.levels))


def test_the_first_level_is_drawn_from_the_prompt_behind_the_root() -> None:
    drafter = LookaheadDrafter(LookaheadConfig(window_size=20))
    drafter.begin(PROMPT)
    (level,) = window_of(drafter)
    assert level[0] == PROMPT[-1]
    assert set(level[1:]) <= set(PROMPT)
    assert len(set(level)) > 2


def test_extra_tokens_are_the_window_without_its_root_level_by_level() -> None:
    drafter = begun((4, 4, 3))
    for _ in range(5):
        window = window_of(drafter)
        tree = step(drafter)
        assert tree.tokens[0] == window[0][0]
        assert tree.extra is not None
        assert tree.extra.tokens == (*window[0][1:], *itertools.chain(*window[1:]))


def test_the_last_level_s_next_tokens_come_from_the_raw_logits() -> None:
    """Node rows and lower levels are not read; the first level's includes the root's row."""
    drafter = begun((3, 3, 2), prompt=[1, 2, 9, 1, 2, 9, 1], drafter_class=WindowDrafter)
    tree = drafted_by(drafter, PLENTY)
    assert tree.num_columns == 3
    learned(drafter, tree, logits_for([30, 31, 32]), [30])
    assert window_of(drafter)[1][:2] == (31, 32), "on by one position: the root's column is gone"
    before = window_of(drafter)
    tree = drafted_by(drafter, PLENTY)
    assert tree.num_columns == 6
    learned(drafter, tree, logits_for([40, 0, 0, 41, 42, 43]), [40])
    after = window_of(drafter)
    assert after[1] == (41, 42, 43)
    assert after[0] == (40, *before[1][1:])


def test_a_full_window_yields_its_columns_as_ngrams() -> None:
    window = JacobiWindow(width=2, num_levels=2, source=[5], generator=random.Random(0))
    assert window.observe([6, 7]) == []
    window.set_root(1)
    assert window.levels == [[1, 5], [7, 5]]
    assert window.observe([8, 9]) == [(1, 7, 8), (5, 5, 9)]
    window.set_root(2)
    assert window.levels == [[2, 5], [8, 9]]
    assert window.observe([3, 4]) == [(2, 8, 3), (5, 9, 4)]


def test_a_window_that_was_not_computed_stays_but_for_its_root() -> None:
    drafter = begun((4, 4, 3))
    for _ in range(5):
        step(drafter)
    before = window_of(drafter)
    tree = drafted_by(drafter, PLENTY).with_extra(None)
    learned(drafter, tree, logits_for([11] * len(tree)), [11, 12])
    assert window_of(drafter) == ((12, *before[0][1:]), *before[1:])
    learned(drafter, drafted_by(drafter, PLENTY), None, [13])
    assert window_of(drafter) == ((13, *before[0][1:]), *before[1:])


@pytest.mark.parametrize("max_nodes", [None, 1])
def test_rows_are_counted_in_the_tree_that_was_computed(max_nodes: int | None) -> None:
    """Whatever nodes the loop cut, the root's row is the first and the window's are the last."""
    drafter = LookaheadDrafter(config((3, 2, 4)))
    drafter.begin([1, 2, 1, 3, 1, 4, 1])
    tree = drafted_by(drafter, PLENTY).truncated(max_nodes=max_nodes)
    rows = logits_for([30, *[2] * (len(tree) - 1), 21, 22])
    padding = logits_for([9, 9])
    learned(drafter, tree, torch.cat([rows, padding]), [1])
    assert window_of(drafter) == ((1, 21, 22),)
    assert (30,) in [tail for tail, _ in drafter._pool.entries(1)]
