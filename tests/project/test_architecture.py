"""The architecture page shows the package as it is."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "hf_specdec"
MODULES = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def page() -> str:
    return (DOCS / "concepts" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_has_the_layers_of_pyproject() -> None:
    """`python docs/draw_layers.py` would change nothing."""
    script = runpy.run_path(str(DOCS / "draw_layers.py"))
    picture = script["PICTURE"].read_text(encoding="utf-8")
    assert picture == script["render"]()
    shown = [name.rstrip("/") for name in re.findall(r"<text [^>]*>([^<]+)</text>", picture)]
    assert sorted(shown) == sorted(MODULES - {"__init__"})


def test_the_table_has_every_module() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", page().partition("## The way of a call")[0], re.MULTILINE)
    named = {name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert MODULES - {"__init__", "__main__"} <= named <= MODULES


def test_the_files_that_the_page_names_are_there() -> None:
    """Paths with their folder; and all runners of draft networks."""
    text = page()
    named = set(re.findall(r"\b(?:api|(?:\w+/)+\w+)\.py\b", text))
    assert len(named) > 10
    assert not {name for name in named if not any((root / name).exists() for root in (PACKAGE, ROOT))}
    files = (PACKAGE / "forward" / "networks").glob("*_runner.py")
    assert set(re.findall(r"`(\w+_runner)`", text)) == {path.stem for path in files}
