"""What the commands print where: data on stdout, notes on stderr. Knows nothing about models."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from hf_specdec.common.stats import SpecStats
from hf_specdec.tools.command_errors import ToldInterrupt, process_rank, to_stderr

PIPE_WIDTH = 120


def stdout_console() -> Console:
    """Console for tables on stdout; outside a terminal it is wide enough not to break their rows."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def note(message: str, style: str | None = None) -> None:
    """One log message on stderr, from the first of several processes."""
    if not process_rank():
        to_stderr(message, style)


@contextlib.contextmanager
def noting_interrupts(message: str) -> Iterator[None]:
    """Say what an interrupt leaves, and how to continue, behind the word "interrupted"."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted{message}")
        raise ToldInterrupt from None


def near_tie_note(dtype: str) -> None:
    """Say why texts of a half precision may differ."""
    note(f"note: in {dtype} a near-tie may fall the other way; --dtype fp32 compares without them", "yellow")


def print_json(document: dict[str, Any]) -> None:
    """The command's one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def drafts_line(stats: SpecStats) -> str:
    """What was drafted and accepted, and why nothing was."""
    drafts = f"drafted {stats.num_draft_tokens}, accepted {stats.num_accepted_tokens}"
    reason = f"; plain: {stats.plain_reason}" if stats.plain_reason else ""
    return f"{drafts}, {stats.mean_acceptance_length:.2f} tokens a verify step{reason}"
