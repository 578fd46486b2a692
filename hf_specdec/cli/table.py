"""The commands' tables."""

from collections.abc import Iterable, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from hf_specdec.cli.compare import PLAIN, Row
from hf_specdec.cli.report import stdout_console

__all__ = ["print_comparison", "print_facts"]


def print_comparison(rows: Sequence[Row], num_prompts: int, caption: str) -> None:
    """The table of `generate --compare`."""
    table = Table(caption=caption, caption_justify="left")
    table.add_column("")
    for heading in ("tokens", "tokens/s", "x plain", "x transf.", "drafted", "accepted", "acceptance\nlength"):
        table.add_column(heading, justify="right")
    table.add_column("equal to\nplain")
    for row in rows:
        table.add_row(
            row.name,
            str(row.tokens),
            f"{row.tokens_per_second:.1f}",
            _times(row.ratio_to_plain),
            _times(row.ratio_to_transformers),
            str(row.drafted),
            str(row.accepted),
            f"{row.mean_acceptance_length:.2f}",
            _equality(row, num_prompts),
        )
    stdout_console().print(table)


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


def _equality(row: Row, num_prompts: int) -> str:
    if row.name == PLAIN:
        return "-"
    return "yes" if row.equal_to_plain else f"no ({row.prompts_equal_to_plain} of {num_prompts})"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
