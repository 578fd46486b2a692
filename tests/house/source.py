"""The package's source as parsed files, for the tests of its structure."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_specdec"


def module_name(file: Path) -> str:
    """Dotted name of a file of the repository."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*folders: Path) -> list[Path]:
    """All Python files below the folders, in a stable order."""
    return sorted(file for folder in folders for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


@cache
def tree_of(file: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_names(file: Path) -> Iterator[tuple[str, str | None]]:
    """Each import of a file as (module, name); the name is `None` for `import module`.

    `from hf_specdec import embedded` counts as an import of the module `hf_specdec.embedded`.
    """
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                if _is_module(f"{module}.{alias.name}"):
                    yield f"{module}.{alias.name}", None
                else:
                    yield module, alias.name


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
