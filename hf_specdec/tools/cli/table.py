"""The commands' tables."""

from collections.abc import Iterable, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from hf_specdec.tools.cli.compare import PLAIN, ComparedRow
from hf_specdec.tools.cli.report import stdout_console

ANY_WIDTH = 1000  # more than any table needs


def print_comparison(rows: Sequence[ComparedRow], num_prompts: int, caption: str) -> None:
    """The table of `generate --compare`; where it is wider than the terminal, one row's values under the other's."""
    cells = {
        row.name: {
            "tokens": str(row.tokens),
            "tokens/s": f"{row.tokens_per_second:.1f}",
            "x\nplain": _times(row.ratio_to_plain),
            "x\ntransf.": _times(row.ratio_to_transformers),
            "drafted": str(row.drafted),
            "accepted": str(row.accepted),
            "acceptance\nlength": f"{row.mean_acceptance_length:.2f}",
            "equal to\nplain": _equality(row, num_prompts),
        }
        for row in rows
    }
    table = Table(caption=caption, caption_justify="left")
    table.add_column("")
    for heading in cells[rows[0].name]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, values in cells.items():
        table.add_row(name, *values.values())
    console = stdout_console()
    if console.measure(table, options=console.options.update(max_width=ANY_WIDTH)).minimum <= console.width:
        console.print(table)
    else:
        for name, values in cells.items():
            print_facts([(name, {heading.replace("\n", " "): value for heading, value in values.items()})])
        console.print(caption)


def print_facts(facts: Iterable[tuple[str, Mapping[str, object]]]) -> None:
    """Titled groups of names and values, one under the other."""
    console = stdout_console()
    for title, group in facts:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in group.items():
            table.add_row(escape(name), escape(_text(value)))
        console.print(table)
        console.print()


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _equality(row: ComparedRow, num_prompts: int) -> str:
    if row.name == PLAIN:
        return "-"
    return f"{row.prompts_equal_to_plain} of {num_prompts}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
