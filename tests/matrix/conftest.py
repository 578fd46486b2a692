"""Draft models that the tests of a family share."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.support import noisy_copy


@pytest.fixture(scope="session")
def draft_of(zoo: Callable[[str], Any]) -> Callable[[str], Any]:
    """The one noisy copy of a family's model."""
    return functools.cache(lambda family: noisy_copy(zoo(family)))
