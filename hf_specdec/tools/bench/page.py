"""A results page: header, figure and table of a file of records. Needs pandas, tabulate and matplotlib."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError, import_extra
from hf_specdec.tools.bench.header import describe
from hf_specdec.tools.bench.rows import TRANSFORMERS
from hf_specdec.tools.bench.table import notes, speed_table, speeds_by_prompt

HEAD = "<!-- Written by `hf-specdec bench --page` from a file of records; measure again instead of editing. -->"
BLUE, RED = "#0072B2", "#D55E00"

Header = Mapping[str, Any]
Record = Mapping[str, Any]


def check_page(path: str | os.PathLike[str]) -> None:
    """Raise where a page cannot be written, before anything is measured.

    Raises:
        MissingExtraError: matplotlib, pandas or tabulate is not installed.
        ConfigError: `path` is no Markdown file.
    """
    check_path("page", path, "a file to write")
    for module in ("pandas", "tabulate", "matplotlib.figure"):
        import_extra(module, "bench", "--page")
    if Path(path).suffix != ".md" or Path(path).is_dir():
        raise ConfigError("page", "must be a file whose name ends in .md", str(path), "For example results.md.")


def write_page(path: str | os.PathLike[str], header: Header, records: Sequence[Record], **options: Any) -> list[Path]:
    """Write a page and its figure, an SVG file of the page's name.

    Args:
        options: of `speed_table`.

    Returns:
        The files, the page first.
    """
    check_page(path)
    page, picture = Path(path), Path(path).with_suffix(".svg")
    page.parent.mkdir(parents=True, exist_ok=True)
    draw_speeds(records, **options).savefig(picture, bbox_inches="tight", metadata={"Date": None})
    page.write_text(page_text(picture.name, header, records, **options), "utf-8")
    return [page, picture]


def page_text(picture: str, header: Header, records: Sequence[Record], **options: Any) -> str:
    """Write the text of a page.

    Args:
        picture: name of the figure's file.
        options: of `speed_table`.
    """
    title, *lines = describe(header)
    table = speed_table(records, **options).astype(object)
    cells = table.where(table.notna(), None).to_markdown(floatfmt=".2f", missingval="-")
    parts = [f"# {title}", HEAD, *lines, f"![Speed of each prompt]({picture})", cells, *notes(records, **options)]
    return "\n\n".join(parts) + "\n"


def draw_speeds(records: Sequence[Record], **options: Any) -> Any:
    """Draw the speeds of all prompts, a dot for each, and their medians.

    Args:
        options: of `speed_table`.

    Returns:
        `matplotlib.figure.Figure`: the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = import_extra("matplotlib.figure", "bench", "a figure").Figure(layout="constrained")
    speeds = speeds_by_prompt(records, **options)
    rows = list(dict.fromkeys(record["row"] for record in records if record["row"] in speeds))
    figure.set_size_inches(9, 1.0 + 0.24 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        axes.scatter(speeds[row], [place] * len(speeds), s=14, alpha=0.6, color=BLUE, linewidths=0)
        axes.plot([speeds[row].median()] * 2, [place - 0.35, place + 0.35], color=RED, linewidth=1.6)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set(xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel(f"speed of each prompt, {options.get('against', TRANSFORMERS)} = 1; line: median")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    return figure
