"""Write the results pages and the picture of README from the documents next to them: `python docs/draw_results.py`.

A document is what `hf-specdec bench --output docs/results/NAME.jsonl` leaves; its page is docs/results/NAME.md.
"""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from hf_specdec.tools.bench import read_document, write_page
from hf_specdec.tools.bench.speeds import panels
from hf_specdec.tools.bench.tables import facts

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent / "images" / "auto-by-task.svg"
ROWS = {"auto": ("auto", "#4c8bf5"), "transformers:prompt_lookup": ("transformers' prompt lookup", "#c8ccd2")}
SHOWN = "smollm2-cpu-avx512"


def main() -> None:
    """Write every page, and the picture of one document."""
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "docs"})
    for file in sorted(RESULTS.glob("*.jsonl")):
        write_page(read_document(file), file.with_suffix(".md"))
    figure = by_task(read_document(RESULTS / f"{SHOWN}.jsonl"))
    figure.savefig(PICTURE, bbox_inches="tight", facecolor="white", metadata={"Date": None})


def by_task(document: dict[str, Any]) -> Figure:
    """Bars of the speed of each row of `ROWS`, task by task, greedy."""
    panel = next(panel for panel in panels(document) if panel.mode == "greedy")
    speeds = {name: panel.rows[name]["speed"] for name in ROWS}
    tasks = [*(task for task in speeds["auto"] if task != "overall"), "overall"]
    figure, axes = plt.subplots(figsize=(9, 2.8))
    width = 0.8 / len(ROWS)
    for place, (name, (label, color)) in enumerate(ROWS.items()):
        values = [speeds[name][task]["median"] for task in tasks]
        starts = [number + place * width for number in range(len(tasks))]
        bars = axes.bar(starts, values, width, align="edge", color=color, label=label)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7, padding=1)
    axes.axhline(1, color="#c0392b", linewidth=0.8)
    labels = [textwrap.fill(task.replace("_", " "), 10, break_long_words=False) for task in tasks]
    axes.set(ylabel="speed, plain generate = 1", xticks=[number + 0.4 for number in range(len(tasks))])
    axes.set_xticklabels(labels, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_title(facts(document)[0], loc="left", fontsize=7, color="#666666")
    return figure


if __name__ == "__main__":
    main()
