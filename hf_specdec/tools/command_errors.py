"""Errors of a command line: `error: ...` and `hint: ...` on stderr, without a traceback.

The exit code is 2 where the arguments cannot be used, 1 where something else fails, and 130 after Ctrl-C.
"""

import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from hf_specdec.errors import RankError, SpecError

INTERRUPTED = 130  # exit code after Ctrl-C


class Command(TyperCommand):
    """A command that reports an error as it was raised; Ctrl-C ends it with exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        """See `typer.core.TyperCommand`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            note("interrupted", "yellow")
            raise typer.Exit(INTERRUPTED) from None
        except (SpecError, ValueError, OSError, ImportError) as error:
            remedy = str(getattr(error, "remedy", ""))
            report(str(error).removesuffix(remedy), remedy)
            is_usage = isinstance(error, (SpecError, ValueError)) and not isinstance(error, RankError)
            raise typer.Exit(2 if is_usage else 1) from error


def report(message: str, hint: str = "") -> None:
    """Print an error and its remedy on stderr, each on one line."""
    where = f"rank {rank}: " if (rank := process_rank()) else ""
    _to_stderr(f"{where}error: {' '.join(message.split())}", "red")
    if hint:
        _to_stderr(f"hint: {' '.join(hint.split())}", "cyan")


def note(message: str, style: str | None = None) -> None:
    """Print one log message on stderr, from the first of several processes."""
    if not process_rank():
        _to_stderr(message, style)


def process_rank() -> int:
    """Number of this process among those of a launch."""
    if "torch" not in sys.modules:
        return 0
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _to_stderr(message: str, style: str | None) -> None:
    Console(file=sys.stderr, highlight=False).print(message, style=style, markup=False, soft_wrap=True)
