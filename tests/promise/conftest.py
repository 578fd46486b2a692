"""Every promise is held for drafts that are sometimes right, always right amid wrong ones, and random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.support import DRAFTS, TREE_DRAFTS
from tests.helpers.zoo import FAMILIES

Draft = Callable[[list[int]], dict[str, Any]]
CHAIN_FAMILIES = {name for name, family in FAMILIES.items() if family.tier == "chain"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out drafts that need trees on families that verify chains; that they are refused is a test of its own."""
    impossible = {item for item in items if _needs_trees(item) and _values(item) & CHAIN_FAMILIES}
    items[:] = [item for item in items if item not in impossible]
    config.hook.pytest_deselected(items=list(impossible))


def _values(item: pytest.Item) -> set[str]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {value for value in parameters.values() if isinstance(value, str)}


def _needs_trees(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent and bool(_values(item) & TREE_DRAFTS)


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Draft:
    """The arguments that ask for drafts, given the text that plain decoding emits."""
    return DRAFTS[request.param]
