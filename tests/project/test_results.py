"""Results pages and the picture of README come from the records besides them."""

import re
import runpy
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.tools.bench import read_records
from hf_specdec.tools.bench.page import page_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))
PAGES = sorted(path for path in RESULTS.glob("*.md") if path.stem != "index")


def test_there_are_records() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_page_says_what_its_records_say(file: Path) -> None:
    page = file.with_suffix(".md").read_text("utf-8")
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert (RESULTS / picture).is_file()
    header, records = read_records(file)
    text = page_text(picture, header, records, by_cpu_time=header["threads"] == 1)
    assert page == runpy.run_path(str(ROOT / "docs" / "draw_results.py"))["titled"](file.stem, text)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_no_page_is_older_than_the_release(page: Path) -> None:
    assert f"hf_specdec {hf_specdec.__version__}" in page.read_text("utf-8")


def test_table_and_picture_of_readme_show_the_figures_of_their_records() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_results.py"))
    _, records = read_records(RESULTS / f"{script['SHOWN']}.jsonl")
    picture = script["PICTURE"].read_text("utf-8")
    for speed in script["speeds_of"](records).to_numpy().flatten():
        assert f">{speed:.2f}<" in picture
    assert script["table_of"](records) in (ROOT / "README.md").read_text("utf-8")
