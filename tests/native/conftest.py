"""The compiled core of these very sources, built for the tests, whatever is installed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Any:
    build: Callable[[Path, Path], Path | None] = load("hatch_build", ROOT / "hatch_build.py").built
    library = build(ROOT, tmp_path_factory.mktemp("core"))
    if library is None:
        pytest.skip("no C compiler works here")
    return load("hf_specdec.kernels.native._core", library)
