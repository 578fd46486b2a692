"""Files and functions stay small, the package's face is written down in order, and only compat looks into transformers.

What ruff and import-linter can check, `make lint` checks: see pyproject.toml.
"""

import ast
import re
from pathlib import Path

import pytest

import hf_specdec

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_specdec"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FILES = sorted(file for folder in ("hf_specdec", "tests", "docs", "demos") for file in (ROOT / folder).rglob("*.py"))
# transformers' documented names and its documented package of generation; everything else may move.
LOOKS_INSIDE = re.compile(r"^\s*(?:from|import) (transformers\.(?!generation import )\S+)", re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_only_compat_imports_what_may_move_in_transformers() -> None:
    found = {str(file.relative_to(PACKAGE)): LOOKS_INSIDE.findall(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert any(names for file, names in found.items() if file.startswith("compat"))
    assert not {file: names for file, names in found.items() if names and not file.startswith("compat")}


def test_the_public_names_are_sorted_and_documented() -> None:
    names = hf_specdec.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    for name in names:
        assert name.startswith("__") or getattr(hf_specdec, name).__doc__, f"{name} needs a docstring"
