"""Every promise is held for drafts that are sometimes right, always right among wrong ones, and random.

The tests of a file share families, drafts and settings: `make test` runs each test on some, each of them in some test.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cover import IN_FILE
from tests.helpers.support import DRAFTS, TREE_DRAFTS
from tests.helpers.zoo import FAMILIES

Draft = Callable[[list[int]], dict[str, Any]]
CHAIN_FAMILIES = {name for name, family in FAMILIES.items() if family.tier == "chain"} | {"deepseek_v4"}  # of zoo_wide


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out drafts that need trees on families that verify chains; that they are refused is a test of its own."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    impossible = {item for item in here if _values(item) & TREE_DRAFTS and _values(item) & CHAIN_FAMILIES}
    items[:] = [item for item in items if item not in impossible]
    config.hook.pytest_deselected(items=list(impossible))
    for item in here:
        item.add_marker(IN_FILE)


def _values(item: pytest.Item) -> set[str]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {value for value in parameters.values() if isinstance(value, str)}


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Draft:
    """The arguments that ask for drafts, given the text that plain decoding emits."""
    return DRAFTS[request.param]


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """One entry for each graph that a counting backend is given."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """The cyclic collector does not run."""
    gc.collect()
    gc.freeze()  # what other tests have left is neither looked at nor collected
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
