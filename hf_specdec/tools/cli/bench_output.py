"""What `hf-specdec bench` shows: rich tables and a progress bar on a terminal, JSON or markdown on request."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_specdec.tools.bench.captions import NOT_EQUAL, facts, notes
from hf_specdec.tools.bench.tables import Table, markdown, tables
from hf_specdec.tools.cli.report import note, print_json, stdout_console
from hf_specdec.tools.command_errors import process_rank

INTERRUPTED = 130  # exit code
WIDEST_TABLE = 240  # in a pipe, where nothing says how wide a line may be


def show(document: dict[str, Any], *, as_json: bool, as_markdown: bool) -> None:
    """Print a document in the form asked for."""
    if as_json:
        print_json(document)
    elif as_markdown:
        sys.stdout.write(markdown(document))
    else:
        _print_tables(document)


def note_interrupt(*, has_measured: bool, hint: str = "") -> None:
    """Say what an interrupt leaves.

    Args:
        hint: how to continue, if there is a way.
    """
    if not has_measured:
        note("interrupted before anything was measured")
    else:
        note(f"interrupted: what has been measured follows{hint and f'; {hint}'}")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr where that is a terminal, of the first of several processes.

    Gives the function that moves it: what comes now, its number, the number of all.
    """
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_shown = console.is_terminal and not process_rank()
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as progress:
        bar = progress.add_task("warming up", total=None)

        def advance(what: str, number: int, total: int) -> None:
            progress.update(bar, description=escape(what), completed=number, total=total)

        yield advance


def _print_tables(document: dict[str, Any]) -> None:
    console = stdout_console()
    if not console.is_terminal:
        console.width = WIDEST_TABLE
    for line in facts(document):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    for table in tables(document):
        console.print(_drawn(table))
    for line in notes(document):
        style = "bold red" if line.startswith(NOT_EQUAL) else "dim"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=table.title or None, title_justify="left", title_style="bold")
    for number, heading in enumerate(table.headings):
        drawn.add_column(escape(heading), justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
    for cells in table.rows:
        drawn.add_row(*map(escape, cells), style="bold red" if any(NOT_EQUAL in cell for cell in cells) else None)
    return drawn
