"""Files and functions stay small, and the public names are sorted and documented.

What ruff and import-linter can check, `make lint` checks: see pyproject.toml.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import hf_specdec
from tests.faults import MUTANTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_specdec"
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
FILES = sorted(file for folder in ("hf_specdec", "tests", "docs", "demos") for file in (ROOT / folder).rglob("*.py"))


def functions_of(file: Path) -> Iterator[tuple[str, int]]:
    """Name of each function and lines of its body; a command's parameters are its options."""
    blocks: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while blocks:
        block = blocks.pop()
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef):
            yield block.name, (block.end_lineno or block.lineno) - block.body[0].lineno + 1
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements = getattr(block, name, [])  # of a conditional expression, one expression
            blocks += statements if isinstance(statements, list) else []


def test_files_stay_small() -> None:
    lines = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").count("\n") for file in FILES}
    assert len(lines) > 100
    assert not {file: count for file, count in lines.items() if count > MAX_FILE_LINES}


def test_the_package_shows_sixteen_names_at_most() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert {"call", "engine", "methods", "tools"} <= names
    assert len(names) <= 16


def test_functions_stay_small() -> None:
    lines = {(str(file.relative_to(ROOT)), name): count for file in FILES for name, count in functions_of(file)}
    assert len(lines) > 1000
    assert not {where: count for where, count in lines.items() if count > MAX_FUNCTION_LINES}


def test_the_public_names_are_sorted_and_documented() -> None:
    names = hf_specdec.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    for name in names:
        assert name.startswith("__") or getattr(hf_specdec, name).__doc__, f"{name} needs a docstring"


def test_every_fault_of_the_mutants_can_be_made() -> None:
    """The text that a fault replaces is in its file exactly once, and the file with the fault is Python."""
    texts = {mutant.name: (PACKAGE / mutant.file).read_text(encoding="utf-8") for mutant in MUTANTS}
    assert not {mutant.name: count for mutant in MUTANTS if (count := texts[mutant.name].count(mutant.old)) != 1}
    for mutant in MUTANTS:
        if mutant.file.endswith(".py"):
            ast.parse(texts[mutant.name].replace(mutant.old, mutant.new))
