"""Write the results pages, and table and picture of README, from records: `python docs/draw_results.py`.

Records are what `hf-specdec bench --output docs/results/NAME.jsonl` leaves; their page is docs/results/NAME.md. Speeds
of one thread are of processor time, of several by the clock. README shows the rows of `BARS` and `LINES` that the
records of `SHOWN` have: docs/results/run_peers.py measures those of other libraries too.
"""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from hf_specdec.tools.bench import read_records, speed_table, write_page
from hf_specdec.tools.bench.header import describe

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "auto-by-task.svg"
SHOWN = "smollm2-cpu-avx512"
TITLES = {  # of pages, most of whose models and machines are the same
    "smollm2-cpu-avx512": "SmolLM2 on one CPU thread, bf16",
    "smollm2-cpu-avx512-sampled": "SmolLM2 on one CPU thread, bf16, sampled",
    "smollm2-cpu-avx512-fp32": "SmolLM2 on one CPU thread, fp32",
    "smollm2-cpu-avx512-2-threads": "SmolLM2 on two CPU threads, bf16",
    "beside-its-peers": "SmolLM2 beside other libraries",
    "beside-its-peers-embedded": "The embedded target beside other libraries",
}
BARS = {
    "transformers:prompt_lookup": ("transformers' prompt lookup", "#c8ccd2"),
    "plain, same kernels": ("plain, same kernels", "#a9c8fb"),
    "auto": ("auto", "#2f6fe4"),
    "llama.cpp bf16": ("llama.cpp, bf16", "#e3a857"),
}
LINES = {
    "transformers generate": "transformers' `generate`",
    "transformers:prompt_lookup": "transformers' prompt lookup",
    "plain, same kernels": '`"plain"`: nothing drafted, this package\'s kernels',
    "auto": '`"auto"`',
    "auto+head": '`"auto"` with the draft head of `hf_specdec[models]`',
    "llama.cpp bf16": "llama.cpp, bf16",
    "OpenVINO f16, lookup": "OpenVINO GenAI, fp16, with its prompt lookup",
    "auto, Q8_0": '`"auto"`, weights in Q8_0',
    "llama.cpp Q8_0": "llama.cpp, Q8_0",
}
COLUMNS = {"overall": "speed", "least": "slowest prompt", "tokens/s": "tokens/s", "tokens/step": "tokens a forward"}
MARKS = "<!-- speeds -->\n", "<!-- end of speeds -->"


def main() -> None:
    """Write every page, and the picture of one file."""
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "docs"})
    for file in sorted(RESULTS.glob("*.jsonl")):
        header, records = read_records(file)
        page, _ = write_page(file.with_suffix(".md"), header, records, by_cpu_time=header["threads"] == 1)
        page.write_text(titled(page.stem, page.read_text("utf-8")), "utf-8")
    header, records = read_records(RESULTS / f"{SHOWN}.jsonl")
    by_task(describe(header)[0], speeds_of(records)).savefig(
        PICTURE, bbox_inches="tight", facecolor="white", metadata={"Date": None}
    )
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    readme.write_text(before + MARKS[0] + table_of(records) + MARKS[1] + after, "utf-8")


def titled(name: str, text: str) -> str:
    """Text of a page under the title of its name, where it has one."""
    return f"# {TITLES[name]}\n\n{text.removeprefix('# ')}" if name in TITLES else text


def speeds_of(records: list[dict[str, Any]]) -> Any:
    """Speeds of the rows of `BARS` by task and overall, a data frame."""
    table = speed_table(records, by_cpu_time=True)
    return table.loc[[row for row in BARS if row in table.index], :"overall"]


def table_of(records: list[dict[str, Any]]) -> str:
    """README's table: the rows of `LINES`."""
    table = speed_table(records, by_cpu_time=True)
    columns = {name: label for name, label in COLUMNS.items() if name in table}
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---|" + "---|" * len(columns)]
    for row, label in LINES.items():
        if row in table.index:
            figures = [f"{figure:.2f}" if figure == figure else "" for figure in table.loc[row, list(columns)]]
            lines.append(f"| {label} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def by_task(title: str, speeds: Any) -> Figure:
    """Bars of the speed of each row, task by task."""
    figure, axes = plt.subplots(figsize=(10, 3))
    width, tasks = 0.86 / len(speeds), list(speeds)
    for place, (label, color) in enumerate(BARS[row] for row in speeds.index):
        starts = [number + place * width for number in range(len(tasks))]
        bars = axes.bar(starts, speeds.iloc[place], width, align="edge", color=color, label=label)
        axes.bar_label(bars, fmt="{:.2f}", fontsize=5.5, padding=1)
    axes.axhline(1, color="#c0392b", linewidth=0.8)
    labels = [textwrap.fill(task.replace("_", " "), 10, break_long_words=False) for task in tasks]
    axes.set(ylabel="speed, plain generate = 1", xticks=[number + 0.43 for number in range(len(tasks))])
    axes.set_xticklabels(labels, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1.08))
    axes.set_title(title, loc="left", fontsize=7, color="#666666", pad=4)
    return figure


if __name__ == "__main__":
    main()
