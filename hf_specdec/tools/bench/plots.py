"""Figures of a document, as PNG and SVG. Reads the same JSON that the tables come from; needs matplotlib."""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError, import_extra
from hf_specdec.tools.bench.document import SPEEDS, Document
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.speeds import panels
from hf_specdec.tools.bench.statistics import OVERALL
from hf_specdec.tools.bench.tables import facts

# Okabe and Ito's colours, told apart by colour-blind readers; in order of use.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
FORMATS = ("png", "svg")

Draw = Callable[[Document, Any], None]


def has_figures(document: Document) -> bool:
    """Tell documents of a kind that has figures; others have tables alone."""
    return document.get("kind") in _figures()


def plot_document(
    document: Document, folder: str | os.PathLike[str], *, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw every figure that the document has numbers for; returns the files.

    Args:
        formats: suffixes of the files that are written of each figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: a document of another kind, or `folder` is no path.
    """
    check_path("folder", folder, "a folder")
    check_matplotlib()
    kind, figures = document.get("kind"), _figures()
    if kind not in figures:
        raise ConfigError("document", f"must be of kind {', '.join(figures)}", kind, "Give one of hf-specdec bench.")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in figures[kind].items():
        figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
        draw(document, figure)
        figure.text(0.01, -0.01, facts(document)[0], fontsize=7, color="0.4", va="top")
        for suffix in formats:
            files.append(target / f"{name}.{suffix}")
            undated = {"Date": None} if suffix == "svg" else None
            figure.savefig(files[-1], dpi=160, bbox_inches="tight", metadata=undated)
    return files


def _figures() -> dict[str, dict[str, Draw]]:
    """Figures of each kind of document, by the file's name."""
    return {
        SPEEDS: {"speed_by_prompt": _speed_by_prompt},
    }


def check_drawn(field: str, kind: str, folder: str | os.PathLike[str]) -> None:
    """Raise where there are no figures of documents of a kind, before anything is measured."""
    if kind not in _figures():
        remedy = f"There are figures of {', '.join(_figures())}; --page writes the tables of any document."
        raise ConfigError(field, f"must be left out with a document of kind {kind}", str(folder), remedy)


def check_matplotlib() -> None:
    """Raise where there is none, before anything is measured."""
    import_extra("matplotlib.figure", "bench", "--plot")


def _speed_by_prompt(document: Document, figure: Any) -> None:
    """Every prompt a dot, by row; a line at the median, a bar at the fifth percentile, and the least as a number."""
    drawn = panels(document)
    figure.set_size_inches(9, sum(0.8 + 0.24 * len(panel.rows) for panel in drawn))
    for axes, panel in zip(figure.subplots(len(drawn), squeeze=False).flat, drawn, strict=True):
        rows = [(name, row) for name, row in panel.rows.items() if name != REFERENCE]
        for place, (_, row) in enumerate(rows):
            ratios = row["speed_by_prompt"]
            axes.scatter(ratios, [place] * len(ratios), s=14, alpha=0.6, color=COLOURS[0], linewidths=0)
            if OVERALL in row["speed"]:
                median, low = row["speed"][OVERALL]["median"], row["speed_fifth_percentile"]
                axes.plot([median] * 2, [place - 0.35, place + 0.35], color=COLOURS[1], linewidth=1.6)
                axes.plot([low] * 2, [place - 0.25, place + 0.25], color="0.3", linewidth=1)
                label = f"{median:.2f}  5 %: {low:.2f}  least: {row['speed_least']:.2f}"
                axes.annotate(label, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"speed of each prompt, {REFERENCE} = 1")
        axes.set_title(panel.title, loc="left", fontsize=10)
        _tidy(axes, grid="x")


def _tidy(axes: Any, grid: str = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
