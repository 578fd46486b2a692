"""Every promise is held for drafts that are sometimes right, always right amid wrong ones, and random."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import DRAFTS

Draft = Callable[[list[int]], dict[str, Any]]


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Draft:
    """The arguments that ask for drafts, given the text that plain decoding emits."""
    return DRAFTS[request.param]
