"""What every test shares: one thread, quiet logs, and models that are built once for all tests."""

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from tests.helpers.cover import mark_wide
from tests.helpers.zoo import FALLBACK, FAMILIES, build

gc.disable()  # nothing that imports and collection make is garbage
torch.set_num_threads(1)
tf.logging.set_verbosity_error()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of thinned tests, `make test` runs a cover of their cells."""
    mark_wide(items)


def pytest_collection_finish() -> None:
    """The collector leaves modules and tests alone from here on: they stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def zoo() -> Callable[[str], Any]:
    """The one model of a family, with `spec_method` switched on, whatever an earlier test has done to it."""
    import hf_specdec

    built = functools.cache(lambda name: build((FAMILIES | FALLBACK)[name]))
    return lambda name: hf_specdec.enable(built(name))


@pytest.fixture
def model(zoo: Callable[[str], Any]) -> Any:
    """The enabled Llama, for tests that need any one model. Leave it as it was."""
    return zoo("llama")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded pair's tokenizer."""
    from hf_specdec import embedded

    return tf.AutoTokenizer.from_pretrained(embedded.path("target"))


@pytest.fixture(autouse=True)
def same_seed_everywhere() -> Iterator[None]:
    """Each test starts from the same random state, whatever ran before."""
    torch.manual_seed(0)
    yield
