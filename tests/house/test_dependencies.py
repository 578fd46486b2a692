"""Imports point one way, and private names of transformers stay in one room."""

import ast
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, ROOT, imported_names, module_name, python_files, tree_of

# A room may import its own layer and those below it.
LAYERS = (
    {"cli", "bench", "demos", "__main__"},
    {"api", "decoding", "loading", "many", "pair", "placement", "prepare", "request", "self_draft", "state", "tuning"},
    {"engine", "methods", "capability", "weights"},
    {"drafters", "verify", "cache", "static_cache", "attention", "kernels"},
    {"tree", "compat", "compat_attention", "compat_placement"},
    {"config", "stats", "errors", "embedded", "progress"},
)
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}
SHARED_BY_DRAFTERS = {
    "acceptance",
    "auto_window",
    "base",
    "calibration",
    "candidates",
    "experience",
    "lookahead_pool",
    "lookahead_window",
    "matches",
    "memory_file",
    "mixer",
    "ngram_index",
    "ngram_pool",
    "predictor",
    "recycled",
    "scorer",
    "spec_memory",
    "top_counts",
}
TRAINING = "hf_specdec.training.embedded"
PUBLIC_MODULES = {"transformers", "transformers.generation"}

FILES = [file for file in python_files(PACKAGE) if file != PACKAGE / "__init__.py"]
RUNTIME = [file for file in FILES if not module_name(file).startswith(TRAINING)]
COMPAT = ("compat.py", "compat_attention.py", "compat_placement.py", "weights/compat.py")
OUTSIDE_COMPAT = [file for file in RUNTIME if file not in [PACKAGE / name for name in COMPAT]]


def names(files: list[Path]) -> list[str]:
    return [module_name(file) for file in files]


def room(module: str) -> str:
    return module.split(".")[1]


def own_imports(file: Path) -> list[str]:
    return [module for module, _ in imported_names(file) if module.split(".")[0] == "hf_specdec"]


def test_every_room_has_a_layer() -> None:
    """A new file or folder of the package must be put into `LAYERS`."""
    rooms = {room(module_name(file)) for file in FILES}
    assert rooms <= DEPTH.keys(), f"without a layer: {sorted(rooms - DEPTH.keys())}"


@pytest.mark.parametrize("file", RUNTIME, ids=names(RUNTIME))
def test_imports_point_down(file: Path) -> None:
    own = room(module_name(file))
    for module in own_imports(file):
        if module == "hf_specdec":
            assert DEPTH[own] == 0, "only the outermost layer may import the package's face"
        else:
            assert DEPTH[room(module)] >= DEPTH[own], f"{own} must not import {module}"


@pytest.mark.parametrize("file", python_files(PACKAGE / "drafters"), ids=names(python_files(PACKAGE / "drafters")))
def test_drafters_do_not_know_one_another(file: Path) -> None:
    """A drafter imports the base class and the shared index and pool, never another drafter."""
    for module in own_imports(file):
        if module.startswith("hf_specdec.methods."):
            assert module.split(".")[2] in SHARED_BY_DRAFTERS


@pytest.mark.parametrize("file", RUNTIME, ids=names(RUNTIME))
def test_nothing_imports_the_training_code(file: Path) -> None:
    assert not [module for module in own_imports(file) if module.startswith(TRAINING)]


def test_the_training_code_needs_only_the_package_s_lowest_layer() -> None:
    for file in python_files(PACKAGE / "embedded" / "training"):
        for module in own_imports(file):
            assert module.startswith(TRAINING) or room(module) in LAYERS[-1], f"{file.name} imports {module}"


@pytest.mark.parametrize("file", OUTSIDE_COMPAT, ids=names(OUTSIDE_COMPAT))
def test_only_compat_imports_from_inside_transformers(file: Path) -> None:
    """Names at transformers' top level are its public interface; the rest may move between versions."""
    for module, name in imported_names(file):
        if module.split(".")[0] == "transformers":
            assert module in PUBLIC_MODULES, f"import {module} in compat.py instead"
            assert name is None or not name.startswith("_")


@pytest.mark.parametrize("file", OUTSIDE_COMPAT, ids=names(OUTSIDE_COMPAT))
def test_only_compat_touches_private_attributes_of_others(file: Path) -> None:
    """An attribute with a leading underscore belongs to the file that defines it."""
    tree = tree_of(file)
    used = {node.attr for node in ast.verify_tree(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    assert used <= defined_names(tree) | inherited_names(file), f"of others: {sorted(used - defined_names(tree))}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.Module) -> set[str]:
    """Functions, class attributes, slots and attributes of `self` that a file defines."""
    found: set[str] = set()
    for node in ast.verify_tree(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def inherited_names(file: Path) -> set[str]:
    """What the files of the package that this one imports define: a subclass may use its base's."""
    modules = {module for module in own_imports(file) if module.count(".") >= 1}
    files = [ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    return {
        name
        for imported in files
        if imported.is_file() and imported.name not in COMPAT
        for name in defined_names(tree_of(imported))
    }
