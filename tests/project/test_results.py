"""Results pages and the picture of README come from the documents besides them."""

import re
import runpy
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.tools.bench.page import page_text
from hf_specdec.tools.bench.speeds import panels
from hf_specdec.tools.bench.tables import read_document

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = sorted(RESULTS.glob("*.jsonl"))
PAGES = sorted(path for path in RESULTS.glob("*.md") if path.stem != "index")


def test_there_are_documents() -> None:
    assert DOCUMENTS


@pytest.mark.parametrize("file", DOCUMENTS, ids=[file.stem for file in DOCUMENTS])
def test_a_page_says_what_its_document_says(file: Path) -> None:
    figures = sorted(path.relative_to(RESULTS) for path in (RESULTS / file.stem).iterdir())
    page = file.with_suffix(".md").read_text("utf-8")
    shown = [Path(link) for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)]
    assert sorted(shown) == figures
    assert page == page_text(read_document(file), shown)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_no_page_is_older_than_the_release(page: Path) -> None:
    assert f"hf_specdec {hf_specdec.__version__}" in page.read_text("utf-8")


def test_the_picture_of_readme_shows_the_figures_of_its_document() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_results.py"))
    document = read_document(RESULTS / f"{script['SHOWN']}.jsonl")
    (panel,) = (panel for panel in panels(document) if panel.mode == "greedy")
    picture = script["PICTURE"].read_text("utf-8")
    for name in script["ROWS"]:
        for speed in panel.rows[name]["speed"].values():
            assert f">{speed['median']:.2f}<" in picture
