"""A copy of what threads share is of one moment, whatever the others do while it is made."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_specdec.methods.common.ngrams import NgramPool
from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts

# What is shared, a change of it, and what is seen of it.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "texts": (lambda: NgramPool(100), lambda pool: pool.add([5, 6, 7]), lambda pool: pool.generations()),
    "acceptances": (AcceptanceCounts, lambda counts: counts.record([(0, 0.9, True)]), lambda counts: counts.mean(0)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changes_while_a_copy_is_made_is_not_in_it(case: str) -> None:
    make, change, seen = CASES[case]
    shared = make()
    change(shared)
    before, state = seen(shared), shared.__getstate__()
    change(shared)
    twin = type(shared).__new__(type(shared))
    twin.__setstate__(state)
    assert seen(twin) == before != seen(shared)
