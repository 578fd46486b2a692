"""What every test shares: one thread, quiet logs, and models that are built once for all tests."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cover import mark_wide

TESTS = Path(__file__).parent
PROBING = {"capabilities", "forward", "gpu", "kernels", "quantization"}  # folders whose tests are of the probes


def pytest_configure(config: pytest.Config) -> None:
    """One thread and quiet logs where tests run; a process that hands them to others imports no torch."""
    gc.disable()  # nothing that imports and collection make is garbage
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch
        import transformers as tf

        torch.set_num_threads(1)
        tf.logging.set_verbosity_error()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of thinned tests, `make test` runs a cover of their cells."""
    mark_wide(items)


def pytest_collection_finish() -> None:
    """The collector leaves modules and tests alone from here on: they stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests leave out probes that others ran on models that are alike."""
    from tests.helpers.known_probes import run_once

    folders = item.path.relative_to(TESTS).parts
    run_once(PROBING.isdisjoint(folders) and item.get_closest_marker("probes_anew") is None)


@pytest.fixture(scope="session")
def zoo() -> Callable[[str], Any]:
    """The one model of a family, with `spec_method` switched on, whatever an earlier test has done to it."""
    import hf_specdec
    from tests.helpers.zoo import FALLBACK, FAMILIES, build

    built = functools.cache(lambda name: build((FAMILIES | FALLBACK)[name]))
    return lambda name: hf_specdec.enable(built(name))


@pytest.fixture
def model(zoo: Callable[[str], Any]) -> Any:
    """The enabled Llama, for tests that need any one model. Leave it as it was."""
    return zoo("llama")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `Recorder` in the place of torch's compiler."""
    from hf_specdec.compat import compiling
    from tests.helpers.graphs import Recorder

    made = Recorder()
    monkeypatch.setattr(compiling, "compiled", made)
    monkeypatch.setattr(compiling, "num_compiled", lambda: made.num_graphs)
    return made


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded pair's tokenizer."""
    from transformers import AutoTokenizer

    from hf_specdec import embedded

    return AutoTokenizer.from_pretrained(embedded.path("target"))


@pytest.fixture(autouse=True)
def same_seed_everywhere() -> None:
    """Each test starts from the same random state, whatever ran before."""
    from tests.helpers.support import seed

    seed(0)
