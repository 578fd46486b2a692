"""Thins the cells of wide tests: which of its parameters' combinations `make test` runs.

`@pytest.mark.pairwise` keeps cells that together hold every pair of values of two parameters, or of two of those that
it names, and `@pytest.mark.each_value` cells that hold every value. The tests of a file that are marked
`each_value_in_file` share one cover: it holds a cell of each test, and every value in some test. Of a test with
`@pytest.mark.at_most(n)` n of these cells are kept, spread over all. The others are marked `wide`, and run in
`make test-all`.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import pytest

__all__ = ["IN_FILE", "cover", "mark_wide", "spread", "wide_but"]
Cell = Mapping[str, str]
IN_FILE = "each_value_in_file"
LEFT_OUT = ("wide", "slow", "gpu", "extras", "browser")


def cover(cells: list[Cell], strength: int, among: tuple[str, ...] = ()) -> list[int]:
    """Places of cells that hold every combination of `strength` values that any cell holds, the fullest cell first.

    Of cells as full as one another, the one whose values were chosen least comes first, so that values take turns.

    Args:
        cells: parameter name to what its value looks like.
        strength: 1 for single values, 2 for pairs.
        among: the parameters to combine; of the others single values are held. All, where none is named.
    """
    held = [set(_combinations(cell, strength, among)) for cell in cells]
    holders: dict[frozenset[tuple[str, str]], list[int]] = {}
    for place, combinations in enumerate(held):
        for combination in combinations:
            holders.setdefault(combination, []).append(place)
    num_missing = list(map(len, held))
    chosen: list[int] = []
    uses: Counter[tuple[str, str]] = Counter()
    while fullest := max(num_missing, default=0):
        equal = [place for place, number in enumerate(num_missing) if number == fullest]
        best = min(equal, key=lambda place: sum(uses[value] for value in cells[place].items()))
        chosen.append(best)
        uses.update(cells[best].items())
        for combination in held[best]:
            for place in holders.pop(combination, ()):
                num_missing[place] -= 1
    return sorted(chosen)


def _combinations(cell: Cell, strength: int, among: tuple[str, ...]) -> Iterable[frozenset[tuple[str, str]]]:
    combined = sorted(value for value in cell.items() if not among or value[0] in among)
    yield from (frozenset([value]) for value in cell.items())
    yield from (frozenset(values) for values in itertools.combinations(combined, min(strength, len(combined))))


def wide_but(quick: Container[str], names: Iterable[str]) -> list[Any]:
    """Values of a parameter, all but the quick ones marked as `wide`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.wide) for name in names]


def spread(length: int, count: int) -> list[int]:
    """`count` places of a list, or all if it has no more, as far apart as can be."""
    if count >= length:
        return list(range(length))
    return [0] if count == 1 else [place * (length - 1) // (count - 1) for place in range(count)]


def mark_wide(items: list[pytest.Item]) -> None:
    """Mark as `wide` what the covers of the thinned tests leave out."""
    groups: dict[_Group, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and (group := _group(item)):
            groups.setdefault(group, []).append(item)
    for group, functions in groups.items():
        _keep(functions, cover([_cell(item) for item in functions], group.strength, group.among))
    bounded: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("at_most") and not _is_left_out(item):
            bounded.setdefault(_test(item), []).append(item)
    for functions in bounded.values():
        _keep(functions, spread(len(functions), functions[0].get_closest_marker("at_most").args[0]))


def _keep(items: list[pytest.Function], places: list[int]) -> None:
    """Mark the others as `wide`."""
    for place in {*range(len(items))} - {*places}:
        items[place].add_marker("wide")


class _Group(NamedTuple):
    """What shares a cover: the cells of a test, or of a file's tests."""

    name: str
    strength: int = 1
    among: tuple[str, ...] = ()


def _group(item: pytest.Function) -> _Group | None:
    """The group of a cell; a test's own mark comes before its file's."""
    if _is_left_out(item):
        return None
    test = _test(item)
    if mark := item.get_closest_marker("pairwise"):
        return _Group(test, 2, mark.args)
    if item.get_closest_marker("each_value"):
        return _Group(test)
    return _Group(str(item.path)) if item.get_closest_marker(IN_FILE) else None


def _is_left_out(item: pytest.Function) -> bool:
    return any(mark.name in LEFT_OUT for mark in item.iter_markers())


def _test(item: pytest.Function) -> str:
    return item.nodeid.partition("[")[0]


def _cell(item: pytest.Function) -> Cell:
    """The values of a test's parameters, and the test itself as one more value."""
    return {name: _look(item, name) for name in item.callspec.params} | {"test": item.originalname}


def _look(item: pytest.Function, name: str) -> str:
    try:
        return repr(item.callspec.params[name])
    except ValueError:  # an integer of more digits than Python writes
        return f"{item.originalname}, {item.callspec.indices[name]}"
