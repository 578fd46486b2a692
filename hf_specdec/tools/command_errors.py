"""What a user got wrong on a command line: `error: ...` and `hint: ...` on stderr, in the words of its options.

Errors of this package speak of arguments of Python; whoever typed a command is told of the options in their place.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from typer.models import ArgumentInfo, OptionInfo

from hf_specdec.errors import MOST_SHOWN, ConfigError, MissingExtraError, SpecError, shown

P = ParamSpec("P")
R = TypeVar("R")
OTHER_NAMES = {
    "precision": "dtype",
    "assistant_dtype": "draft_dtype",
    "assistant_model": "draft_model",
    "layer_ids": "layers",
    "new_tokens": "max_new_tokens",
    "widen": "widen_to",
}  # of options, for arguments of Python
FOLDERS = ("model", "draft_model", "head")  # what `path` may be
STDOUT = "<stdout>"  # what an error of standard output has for the name of a file
CONTEXT = "context"  # of typer: how a command is told of the words that were typed
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
FIELD = re.compile(r"`([A-Za-z_]+)`")
TEXT = r"\"[^\"]*\"|'[^']*'"
PYTHON = re.compile(
    r"(?:\w+=)?[\w.]+\([^()]*\)"  # a call: no option says the same
    rf"|(?<![\w/.-])(?P<name>[a-z_]+)=(?P<value>(?:{TEXT})(?: or (?:{TEXT}))*|\{{[^{{}}]*\}}|\.\.\.|\w+(?:\.\w+)*)"
    r"|(?<![\w`\"'/.-])(?P<word>spec_method|spec_config|assistant_model)(?![\w`\"'=/])"
)


def run_program(main: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """Run `main` with the words of the command line; see `reports_errors`.

    Args:
        arguments: the words; by default those that Python was called with.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(reports_errors(main))
    app(args=arguments)


class ToldInterrupt(KeyboardInterrupt):
    """Ctrl-C, after the user was told what it leaves."""


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a user got wrong into `error: ...` and `hint: ...` on stderr and exit code 2.

    Of an option with several names it is told by the one that was typed, where the context's `obj` has the words.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        context: Any = kwargs.pop(CONTEXT, None)
        if sys.stdout is None:  # closed: what is opened next would take its number
            if sys.stderr is not None:
                to_stderr("error: `stdout` must be open, but is closed.", "red")
                to_stderr("hint: redirect it: > FILE or > /dev/null", "cyan")
            raise typer.Exit(2)
        try:
            with contextlib.redirect_stdout(_Stdout(sys.stdout)):
                result = command(*args, **kwargs)
                sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise
        except (SpecError, ValueError, OSError) as error:
            options = _Options(signature.parameters, kwargs, getattr(context, "obj", None))
            where = f"rank {rank}: " if (rank := process_rank()) else ""
            report(*_message_and_hint(error, options), where)
            if getattr(error, "filename", None) == STDOUT:
                _drop_stdout()
            raise typer.Exit(2) from error

    asked = inspect.Parameter(CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # read by typer
        parameters=[*signature.parameters.values(), asked]
    )
    return run


def process_rank() -> int:
    """The number of this process among those of a launch that have found one another."""
    import torch.distributed as dist  # takes seconds; --help and wrong words do without

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def to_stderr(message: str, style: str | None) -> None:
    """One line on stderr, as it is."""
    console = Console(file=sys.stderr, highlight=False)
    console.print(message, style=style, markup=False, soft_wrap=True)


def report(message: str, hint: str | None, where: str = "") -> None:
    """An error and its remedy on stderr; `where` stands before them."""
    to_stderr(f"{where}error: {message}", "red")
    if hint:
        to_stderr(f"hint: {hint}", "cyan")


@contextlib.contextmanager
def within(field: str) -> Iterator[None]:
    """Put `field` before the field of an error that is about a part of its value."""
    try:
        yield
    except ConfigError as error:
        if error.field.partition(" ")[0] == field:
            raise
        raise ConfigError(f"{field} {error.field}", error.rule, error.value, error.remedy) from error


class _Stdout:
    """Standard output whose errors name it: those of the system name no file."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        with _naming_stdout():
            return int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """See `io.IOBase.writelines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """See `io.IOBase.flush`."""
        with _naming_stdout():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STDOUT
        raise


def _drop_stdout() -> None:
    """Let what is left to print go to nowhere: Python would try again when it ends, and fail again."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Options:
    """The options of a command, for the arguments of Python that errors speak of.

    Args:
        parameters: the command's.
        given: the command's parameters; those without a value cannot be what is wrong.
        words: what was typed after the command's name, if that is known.
    """

    def __init__(
        self, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], words: Sequence[str] | None
    ) -> None:
        self.parameters, self.given = parameters, given
        typed = [word.partition("=")[0] for word in words or ()]
        self._typed: dict[str, str] = {}  # the first of an option's names -> the one that was typed last
        for first, *others in map(_option_names, self.parameters.values()):
            if used := [word for word in typed if word in (first, *others)]:
                self._typed[first] = used[-1]

    def as_typed(self, text: str) -> str:
        """The text with each option under the name that was typed."""
        return OPTION.sub(lambda found: self._typed.get(found[0], found[0]), text)

    def for_fields(self, message: str) -> str:
        """The message with options for the names in backticks."""

        def option(found: re.Match[str]) -> str:
            name = self._own_name(found[1])
            if name == "path":
                folders = (folder for folder in FOLDERS if any(path in message for path in self._paths(folder)))
                name = next(folders, name)
            if name not in self.parameters or self.given.get(name) is None:
                return found[0]
            return f"`{typed_name(self.parameters[name])}`"

        return FIELD.sub(option, message)

    def for_field(self, field: str) -> str:
        """A field, in backticks; what stands behind its first word is a part of the option's value."""
        first, space, part = field.partition(" ")
        return f"{self.for_fields(f'`{first}`')[:-1]}{space}{part}`"

    def for_python(self, text: str) -> str:
        """A rule or a remedy with `--name value` for `name=value`, wherever the command has that option."""

        def option(found: re.Match[str]) -> str:
            name = self._own_name(found["name"] or found["word"] or "")
            if name not in self.parameters:
                return found[0]
            value = found["value"]
            return " ".join([typed_name(self.parameters[name]), *([] if value is None else [_typed_value(value)])])

        return PYTHON.sub(option, text)

    def of_path(self, path: str) -> str | None:
        """The option that was given this path, if one was."""
        for name, parameter in self.parameters.items():
            value = self.given.get(name)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str | Path) and os.path.realpath(path) == os.path.realpath(one):
                    return typed_name(parameter)
        return None

    def _own_name(self, name: str) -> str:
        return name if name in self.parameters else OTHER_NAMES.get(name, name)

    def _paths(self, folder: str) -> Iterable[str]:
        """What an option was given, as errors show it."""
        value = self.given.get(folder)
        paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, str | Path)]
        return [repr(os.fspath(path))[:MOST_SHOWN] for path in paths]


def _message_and_hint(error: Exception, options: _Options) -> tuple[str, str | None]:
    """The two, in the words that were typed."""
    message, hint = _in_options(error, options)
    return options.as_typed(message), hint and options.as_typed(hint)


def _in_options(error: Exception, options: _Options) -> tuple[str, str | None]:
    match error:
        case ConfigError():
            message = broken_rule(options.for_field(error.field), options.for_python(error.rule), error.value)
            return options.for_fields(message), options.for_python(error.remedy)
        case OSError(filename=filename, strerror=str() as reason) if filename == STDOUT:
            return f"standard output cannot be written: {reason}.", "Redirect it to another disk: > FILE"
        case OSError(filename=str() as path, strerror=str() as reason) if name := options.of_path(path):
            return f"`{name}` must be a path that can be used, but is {shown(path)}.", f"{reason}."
        case MissingExtraError():
            return f"{error.purpose} needs `{error.package}`.", f'pip install "hf_specdec[{error.extra}]"'
        case _:
            return options.for_python(options.for_fields(" ".join(str(error).split()))), None


def broken_rule(field: str, rule: str, value: object) -> str:
    """The message of a `ConfigError` without its remedy; `field` has its backticks."""
    return f"{field} {rule}, but is {shown(value)}."


def parameter_info(parameter: inspect.Parameter) -> ArgumentInfo | OptionInfo | None:
    """What a command says to typer about a parameter."""
    found = getattr(parameter.annotation, "__metadata__", ())
    return next((info for info in found if isinstance(info, ArgumentInfo | OptionInfo)), None)


def _typed_value(value: str) -> str:
    """A value of Python as a shell takes it."""
    if value == "None":
        return "none"
    return f"'{value}'" if value.startswith("{") else re.sub("[\"']", "", value)


def _option_names(parameter: inspect.Parameter) -> list[str]:
    """What a parameter of a command is called on the command line, the usual name first."""
    match parameter_info(parameter):
        case ArgumentInfo():
            return [parameter.name.upper()]
        case OptionInfo(default=str(first), param_decls=others):
            return [name.partition("/")[0] for name in (first, *(others or ()))]
    return [f"--{parameter.name.replace('_', '-')}"]


def typed_name(parameter: inspect.Parameter) -> str:
    """The usual name of a parameter of a command."""
    return _option_names(parameter)[0]
