"""Rooms stay small, and what a module offers is written down in order."""

import ast
import importlib
from pathlib import Path

import pytest

import hf_specdec
from tests.house.source import PACKAGE, ROOT, module_name, python_files, tree_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
EVERYWHERE = python_files(PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "demos", ROOT / "bench")
MODULES = [file for file in python_files(PACKAGE) if file.name not in ("__init__.py", "__main__.py")]


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("file", EVERYWHERE, ids=[str(file.relative_to(ROOT)) for file in EVERYWHERE])
def test_files_and_functions_stay_small(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in functions(tree_of(file)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("file", MODULES, ids=[module_name(file) for file in MODULES])
def test_modules_say_what_they_are_and_offer(file: Path) -> None:
    """A module opens with its contract; `__all__` is sorted and names things that it defines."""
    tree = tree_of(file)
    assert ast.get_docstring(tree), "a module opens with what it does"
    offered = ast_all(tree)
    assert offered == sorted(offered, key=isort_key)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    public_and_documented = {name for name in defined if not name.startswith("_")} & set(offered)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public_and_documented:
            assert ast.get_docstring(node), f"{node.name} is public and needs a docstring"


def test_the_package_s_face_is_sorted_and_complete() -> None:
    assert list(hf_specdec.__all__) == sorted(hf_specdec.__all__, key=isort_key)
    for name in hf_specdec.__all__:
        offered = getattr(hf_specdec, name)
        assert name.startswith("__") or offered.__doc__, f"{name} needs a docstring"


def test_every_module_can_be_imported_on_its_own() -> None:
    for file in MODULES:
        importlib.import_module(module_name(file))


def ast_all(tree: ast.Module) -> list[str]:
    """The entries of `__all__`; none where a module offers nothing."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def isort_key(name: str) -> tuple[int, str]:
    """ruff's order (RUF022): constants, then classes, then the rest."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name
