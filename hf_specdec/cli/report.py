"""What the commands print where: data on stdout, notes and errors on stderr. Knows nothing about models."""

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
import typer
from rich.console import Console
from typer.models import ArgumentInfo, OptionInfo

from hf_specdec.errors import ConfigError, MissingExtraError, SpecError
from hf_specdec.stats import SpecStats

__all__ = ["drafts_line", "near_tie_note", "note", "print_json", "reports_errors", "stdout_console"]

P = ParamSpec("P")
R = TypeVar("R")
PIPE_WIDTH = 120
OTHER_NAMES = {
    "precision": "dtype",
    "assistant_dtype": "draft_dtype",
    "assistant_model": "draft_model",
    "layer_ids": "layers",
    "new_tokens": "max_new_tokens",
    "widen": "widen_to",
}  # of options, for arguments of Python
FOLDERS = ("model", "draft_model", "head")  # what `path` may be
FIELD = re.compile(r"`([A-Za-z_]+)((?: key)?)`")


def stdout_console() -> Console:
    """Console for tables on stdout; outside a terminal it is wide enough not to break their rows."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def note(message: str, style: str | None = None) -> None:
    """One log message on stderr, from the first of several processes."""
    if not _rank():
        _stderr(message, style)


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


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a user got wrong into `error: ...` and `hint: ...` on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if sys.stdout is None:  # closed: what is opened next would take its number
            if sys.stderr is not None:
                _stderr("error: `stdout` must be open, but is closed.", "red")
                _stderr("hint: redirect it: > FILE or > /dev/null", "cyan")
            raise typer.Exit(2)
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise
        except (SpecError, ValueError, OSError) as error:
            message, hint = _message_and_hint(error)
            message = _as_typed(message, command, kwargs)
            where = f"rank {rank}: " if (rank := _rank()) else ""
            _stderr(f"{where}error: {message}", "red")
            if hint:
                _stderr(f"hint: {hint}", "cyan")
            raise typer.Exit(2) from error

    return run


def _message_and_hint(error: Exception) -> tuple[str, str | None]:
    match error:
        case ConfigError():
            return f"`{error.field}` {error.rule}, but is {error.value!r}.", error.remedy
        case MissingExtraError():
            return f"{error.purpose} needs `{error.package}`.", f'pip install "hf_specdec[{error.extra}]"'
        case _:
            return " ".join(str(error).split()), None


def _as_typed(message: str, command: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """A message with the options of a command for the arguments of Python that it names.

    Args:
        given: the command's parameters; those without a value cannot be what is wrong.
    """
    parameters = inspect.signature(command, eval_str=True).parameters

    def option(found: re.Match[str]) -> str:
        name = found[1] if found[1] in parameters else OTHER_NAMES.get(found[1], found[1])
        if name == "path":
            folders = (folder for folder in FOLDERS if isinstance(given.get(folder), str))
            name = next((folder for folder in folders if repr(given[folder]) in message), name)
        if name not in parameters or given.get(name) is None:
            return found[0]
        return f"`{_typed_name(parameters[name])}{found[2]}`"

    return FIELD.sub(option, message)


def _typed_name(parameter: inspect.Parameter) -> str:
    """What a parameter of a command is called on the command line."""
    for info in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(info, ArgumentInfo):
            return parameter.name.upper()
        if isinstance(info, OptionInfo) and isinstance(info.default, str):  # the first of its names
            return info.default.partition("/")[0]
    return f"--{parameter.name.replace('_', '-')}"


def _rank() -> int:
    """The number of this process among those of a launch that have found one another."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _stderr(message: str, style: str | None) -> None:
    console = Console(file=sys.stderr, highlight=False)
    console.print(message, style=style, markup=False, soft_wrap=True)
