"""A results page: the tables and figures of a document as a Markdown file. Needs matplotlib."""

import os
from pathlib import Path
from typing import Any

from hf_specdec.common.files import check_path, replacing
from hf_specdec.tools.bench.plots import has_figures, plot_document
from hf_specdec.tools.bench.tables import facts, markdown

HEAD = "<!-- Written by `hf-specdec bench --page` from a document; measure again instead of editing. -->"
FOOT = "Another machine makes its own page with `hf-specdec bench --output NAME.jsonl --page NAME.md`."

Document = dict[str, Any]


def write_page(document: Document, path: str | os.PathLike[str]) -> list[Path]:
    """Write a page, and its figures as SVG into a folder next to it that has the page's name without the suffix.

    Returns:
        The files, the page first.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: `path` is none.
    """
    check_path("path", path, "a file to write")
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    figures = plot_document(document, page.with_suffix(""), formats=("svg",)) if has_figures(document) else []
    with replacing(page) as temporary:
        temporary.write_text(page_text(document, [figure.relative_to(page.parent) for figure in figures]), "utf-8")
    return [page, *figures]


def page_text(document: Document, figures: list[Path]) -> str:
    """Models, sizes and hardware as a heading, the figures, the tables, their columns, and how to make such a page.

    Args:
        figures: relative to the page.
    """
    pictures = [f"![{figure.stem.replace('_', ' ').capitalize()}]({figure.as_posix()})" for figure in figures]
    models = [entry["model"] for entry in document["models"]]
    sizes = dict.fromkeys(f"{model['name']}, {model['parameters'] / 1e6:.1f}M parameters" for model in models)
    heading = "; ".join([*sizes, facts(document)[0]])
    return "\n\n".join([f"# {heading}", HEAD, *pictures, markdown(document).rstrip("\n"), FOOT]) + "\n"
