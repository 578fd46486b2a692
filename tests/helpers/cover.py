"""Thins the cells of a wide test: which of its parameters' combinations `make test` runs.

`@pytest.mark.pairwise` keeps cells that together hold every pair of values of two parameters, `@pytest.mark.each_value`
cells that hold every value. The others are marked `wide`, and run in `make test-all`.
"""

import itertools
from collections.abc import Iterable, Mapping

import pytest

__all__ = ["STRENGTHS", "cover", "mark_wide"]

Cell = Mapping[str, str]
STRENGTHS = {"each_value": 1, "pairwise": 2}


def cover(cells: list[Cell], strength: int) -> list[int]:
    """Places of cells that hold every combination of `strength` values that any cell holds, the fullest cell first.

    Args:
        cells: parameter name to what its value looks like.
        strength: 1 for single values, 2 for pairs.
    """
    missing = {place: set(_combinations(cell, strength)) for place, cell in enumerate(cells)}
    chosen: list[int] = []
    while missing:
        best = max(missing, key=lambda place: len(missing[place]))
        held = missing.pop(best)
        if not held:
            break
        chosen.append(best)
        for combinations in missing.values():
            combinations -= held
    return sorted(chosen)


def _combinations(cell: Cell, strength: int) -> Iterable[frozenset[tuple[str, str]]]:
    return (frozenset(values) for values in itertools.combinations(sorted(cell.items()), min(strength, len(cell))))


def mark_wide(items: list[pytest.Item]) -> None:
    """Mark as `wide` what the covers of the thinned tests leave out."""
    tests: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        strengths = [strength for name, strength in STRENGTHS.items() if item.get_closest_marker(name)]
        if strengths and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault((item.nodeid.partition("[")[0], max(strengths)), []).append(item)
    for (_, strength), functions in tests.items():
        cells = [{name: repr(value) for name, value in item.callspec.params.items()} for item in functions]
        kept = set(cover(cells, strength))
        for place, item in enumerate(functions):
            if place not in kept:
                item.add_marker("wide")
