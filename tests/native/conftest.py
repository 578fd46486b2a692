"""The compiled core of these very sources: the installed one, or one that is built for the tests."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_specdec.kernels import native

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
    if native.core is not None:  # it takes none of other sources
        return native.core
    build: Callable[[Path, Path], Path] = load("hatch_build", ROOT / "hatch_build.py").built
    try:
        library = build(ROOT, tmp_path_factory.mktemp("core"))
    except RuntimeError as error:
        pytest.skip(str(error))
    return load("hf_specdec.kernels.native._core", library)
