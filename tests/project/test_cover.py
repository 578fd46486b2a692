"""The cells that `make test` runs of a wide test leave out no value, or no pair of values, of its parameters."""

import itertools
from collections.abc import Mapping

import pytest

from tests.helpers.cover import cover, spread

SIZES = {"family": 7, "method": 5, "mode": 3, "cache": 2}
CELLS: list[Mapping[str, str]] = [
    dict(zip(SIZES, values, strict=True))
    for values in itertools.product(*(map(str, range(size)) for size in SIZES.values()))
]


def pairs(cells: list[Mapping[str, str]], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {values for cell in cells for values in itertools.combinations(cell.items(), strength)}


@pytest.mark.parametrize("cells", [CELLS, CELLS[::3], CELLS[:40]], ids=["all", "a third", "some"])
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_that_occurs_is_kept(cells: list[Mapping[str, str]], strength: int) -> None:
    kept = [cells[place] for place in cover(cells, strength)]
    assert pairs(kept, strength) == pairs(cells, strength)


def test_few_cells_are_needed() -> None:
    assert len(cover(CELLS, 1)) == 7
    assert 35 <= len(cover(CELLS, 2)) <= 45


def test_pairs_may_be_those_of_some_parameters() -> None:
    kept = [CELLS[place] for place in cover(CELLS, 2, ("family", "mode"))]
    assert len(kept) == 7 * 3
    assert pairs(kept, 1) == pairs(CELLS, 1)
    assert len({(cell["family"], cell["mode"]) for cell in kept}) == 7 * 3


def test_values_take_turns() -> None:
    """Tests that share families run on one each, and no family on more tests than another."""
    cells = [{"test": str(test), "family": str(family)} for test in range(6) for family in range(3)]
    kept = [cells[place] for place in cover(cells, 1)]
    assert sorted(cell["test"] for cell in kept) == [str(test) for test in range(6)]
    assert sorted(cell["family"] for cell in kept) == ["0", "0", "1", "1", "2", "2"]


def test_one_cell_is_its_own_cover() -> None:
    assert cover([{"family": "3"}], 2) == [0]


@pytest.mark.parametrize(("length", "count", "kept"), [(7, 3, [0, 3, 6]), (5, 2, [0, 4]), (4, 1, [0]), (2, 3, [0, 1])])
def test_kept_cells_are_spread_over_all(length: int, count: int, kept: list[int]) -> None:
    assert spread(length, count) == kept
