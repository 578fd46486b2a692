"""A results page says what its document holds, and its figures are where it says."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run

__all__ = ["run"]

SPEEDS = ("--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--row", "plain", "--no-do-sample")
COST = ("--cost", "--rounds", "1", "--context-length", "16")


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("options", "cell"), [(SPEEDS, "| plain | "), (COST, "| context of 16 | ")])
def test_a_page_has_the_tables_and_shows_the_figures_beside_it(
    options: tuple[str, ...], cell: str, run: Run, tmp_path: Path
) -> None:
    """Written of a document, as when it is measured."""
    pytest.importorskip("matplotlib")
    document, page = tmp_path / "cpu.json", tmp_path / "cpu.md"
    first = run("bench", *options, "--output", str(document), "--page", str(page))
    assert first.exit_code == 0, first.stderr
    text = page.read_text("utf-8")
    page.unlink()
    assert run("bench", "--show", str(document), "--page", str(page)).exit_code == 0
    assert page.read_text("utf-8") == text
    heading, *lines = text.splitlines()
    assert json.loads(document.read_text())["header"]["hardware"]["cpu"] in heading
    assert any(line.startswith(cell) for line in lines)
    figures = [tmp_path / link for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)]
    assert figures and set(figures) == set((tmp_path / "cpu").iterdir())
    assert all(figure.read_bytes().startswith(b"<?xml") for figure in figures)
