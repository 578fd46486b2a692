"""Write the results pages and the picture of README from the records next to them: `python docs/draw_results.py`.

Records are what `hf-specdec bench --output docs/results/NAME.jsonl` leaves; their page is docs/results/NAME.md. Speeds
of one thread are of processor time, of several by the clock.
"""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from hf_specdec.tools.bench import read_records, speed_table, write_page
from hf_specdec.tools.bench.header import describe

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent / "images" / "auto-by-task.svg"
ROWS = {"auto": ("auto", "#4c8bf5"), "transformers:prompt_lookup": ("transformers' prompt lookup", "#c8ccd2")}
SHOWN = "smollm2-cpu-avx512"


def main() -> None:
    """Write every page, and the picture of one file."""
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "docs"})
    for file in sorted(RESULTS.glob("*.jsonl")):
        header, records = read_records(file)
        write_page(file.with_suffix(".md"), header, records, by_cpu_time=header["threads"] == 1)
    header, records = read_records(RESULTS / f"{SHOWN}.jsonl")
    by_task(describe(header)[0], speeds_of(records)).savefig(
        PICTURE, bbox_inches="tight", facecolor="white", metadata={"Date": None}
    )


def speeds_of(records: list[dict[str, Any]]) -> Any:
    """Speeds of `ROWS` by task and overall, a data frame."""
    table = speed_table(records, by_cpu_time=True)
    return table.loc[list(ROWS), :"overall"]


def by_task(title: str, speeds: Any) -> Figure:
    """Bars of the speed of each row of `ROWS`, task by task."""
    figure, axes = plt.subplots(figsize=(9, 2.8))
    width, tasks = 0.8 / len(ROWS), list(speeds)
    for place, (name, (label, color)) in enumerate(ROWS.items()):
        starts = [number + place * width for number in range(len(tasks))]
        bars = axes.bar(starts, speeds.loc[name], width, align="edge", color=color, label=label)
        axes.bar_label(bars, fmt="{:.2f}", fontsize=7, padding=1)
    axes.axhline(1, color="#c0392b", linewidth=0.8)
    labels = [textwrap.fill(task.replace("_", " "), 10, break_long_words=False) for task in tasks]
    axes.set(ylabel="speed, plain generate = 1", xticks=[number + 0.4 for number in range(len(tasks))])
    axes.set_xticklabels(labels, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_title(title, loc="left", fontsize=7, color="#666666")
    return figure


if __name__ == "__main__":
    main()
