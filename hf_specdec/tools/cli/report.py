"""Output of the commands: data on stdout, notes and progress on stderr. Knows nothing about models."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rich.table
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from hf_specdec.common.stats import SpecStats
from hf_specdec.tools.command_errors import INTERRUPTED, note, process_rank

PIPE_WIDTH = 240  # outside a terminal, so that no row of a table breaks
FACTS_WIDTH = 100  # of sentences, which a reader's eye follows


def stdout_console() -> Console:
    """Console for stdout."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_json(document: Mapping[str, Any]) -> None:
    """Print the command's one JSON document."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_facts(facts: Mapping[str, Mapping[str, object]]) -> None:
    """Print titled groups of names and values, one under the other."""
    console = stdout_console()
    console.width = min(console.width, FACTS_WIDTH)
    for title, group in facts.items():
        table = rich.table.Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in group.items():
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            table.add_row(escape(name), escape(text))
        console.print(table)
        console.print()


def drafts_line(stats: SpecStats) -> str:
    """Drafted and accepted tokens, and why nothing was drafted."""
    drafts = f"drafted {stats.num_draft_tokens}, accepted {stats.num_accepted_tokens}"
    reason = f"; plain: {stats.plain_reason}" if stats.plain_reason else ""
    return f"{drafts}, {stats.mean_acceptance_length:.2f} tokens a verify step{reason}"


@contextlib.contextmanager
def noting_interrupts(message: str) -> Iterator[None]:
    """Say after Ctrl-C what it leaves, and how to continue, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted: {message}")
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows progress on stderr: a bar in a terminal, else a line for each tenth."""
    console = Console(file=sys.stderr)
    is_bar = console.is_terminal and not process_rank()
    with Progress(console=console, disable=not is_bar, transient=True) as progress:
        bar = progress.add_task("warming up", total=None)

        def advance(what: str, number: int, total: int) -> None:
            progress.update(bar, description=escape(what), completed=number, total=total)
            if not is_bar and number and 10 * number // total > 10 * (number - 1) // total:
                note(f"{number} of {total} measured", "dim")

        yield advance
