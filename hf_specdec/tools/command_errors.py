"""Errors of a command line: `error: ...` and `hint: ...` on stderr, without a traceback, and exit code 2.

The package's errors name arguments of Python; the user of a command is told of the options with their values.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from hf_specdec.errors import ConfigError, MissingExtraError, SpecError, shown

INTERRUPTED = 130  # exit code after Ctrl-C
OTHER_NAMES = {
    "precision": "dtype",
    "assistant_dtype": "draft_dtype",
    "assistant_model": "draft_model",
    "layer_ids": "layers",
    "new_tokens": "max_new_tokens",
    "widen": "widen_to",
}  # of options, for arguments of Python
FIELD = re.compile(r"`(\w+)`")
ARGUMENT = re.compile(r"\b(\w+)=([\"'])(.*?)\2")  # such as spec_method="auto"


class Command(TyperCommand):
    """A command that reports what the user got wrong; Ctrl-C ends it with exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        """See `typer.core.TyperCommand`."""
        if sys.stdout is None:  # closed: what is opened next would take its number
            report("`stdout` must be open, but is closed.", "Redirect it: > FILE or > /dev/null")
            raise typer.Exit(2)
        try:
            with _written():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            note("interrupted", "yellow")
            raise typer.Exit(INTERRUPTED) from None
        except (SpecError, ValueError, OSError) as error:
            options = {p.name: p.opts[0] if p.opts[0].startswith("-") else p.name.upper() for p in self.params}
            report(*_described(error, options, ctx.params))
            raise typer.Exit(2) from error


def run_program(main: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """Run `main` as a `Command`.

    Args:
        arguments: words of the command line; by default those that Python was called with.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=Command)(main)
    app(args=arguments)


def report(message: str, hint: str | None) -> None:
    """Print an error and its remedy on stderr."""
    where = f"rank {rank}: " if (rank := process_rank()) else ""
    _to_stderr(f"{where}error: {message}", "red")
    if hint:
        _to_stderr(f"hint: {hint}", "cyan")


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


@contextlib.contextmanager
def within(field: str) -> Iterator[None]:
    """Put `field` before the field of an error that is about a part of its value."""
    try:
        yield
    except ConfigError as error:
        if error.field.partition(" ")[0] == field:
            raise
        raise ConfigError(f"{field} {error.field}", error.rule, error.value, error.remedy) from error


def _described(error: Exception, options: dict[str, str], given: Mapping[str, Any]) -> tuple[str, str | None]:
    """Message and remedy, with options in the place of arguments of Python.

    Args:
        options, given: options and their values, by the names of a command's parameters.
    """
    named = {name: options[own] for name, own in OTHER_NAMES.items() if own in options} | options

    def told(text: str) -> str:
        names = named | ({"path": option} if (option := _option_of(text, options, given)) else {})
        text = FIELD.sub(lambda found: f"`{names.get(found[1], found[1])}`", text)
        return ARGUMENT.sub(lambda found: f"{names[found[1]]} {found[3]}" if found[1] in names else found[0], text)

    match error:
        case ConfigError():
            first, space, part = error.field.partition(" ")
            field = f"`{named.get(first, first)}{space}{part}`"
            return told(f"{field} {error.rule}, but is {shown(error.value)}."), told(error.remedy)
        case MissingExtraError():
            return f"{error.purpose} needs `{error.package}`.", f'pip install "hf_specdec[{error.extra}]"'
        case OSError(filename=str() as path) if option := _option_of(shown(path), options, given):
            return f"`{option}` must be a path that can be used, but is {shown(path)}.", f"{error.strerror}."
    return told(" ".join(str(error).split())), None


def _option_of(text: str, options: Mapping[str, str], given: Mapping[str, Any]) -> str | None:
    """Option whose value a text shows."""
    for name, own in given.items():
        values = own if isinstance(own, list | tuple) else [own]
        if any(isinstance(value, str | Path) and shown(str(value)) in text for value in values):
            return options[name]
    return None


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """A block after which all that was printed has been written.

    Raises:
        SpecError: it cannot be. What is left is dropped: Python would try again at its end.
    """
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise SpecError(f"standard output cannot be written: {error.strerror}") from error


def _to_stderr(message: str, style: str | None) -> None:
    Console(file=sys.stderr, highlight=False).print(message, style=style, markup=False, soft_wrap=True)
