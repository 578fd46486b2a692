"""What typer finds before a command is called: words that are no options of it, or no values of them.

They are reported with `error: ...` and `hint: ...` as other mistakes are. Rules are those of the commands' annotations.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.tools.command_errors import ToldInterrupt, broken_rule, parameter_info, report, to_stderr, typed_name

# typer holds a copy of click from 0.27 on, and names none of its errors
exceptions: Any = importlib.import_module(
    "typer._click.exceptions" if importlib.util.find_spec("typer._click") else "click.exceptions"
)
NUMBERS: Mapping[Any, str] = types.MappingProxyType({int: "a whole number", float: "a number"})


class ReportingCommand(TyperCommand):
    """A command whose wrong options are reported as other mistakes are; see `reports_errors`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """See `typer.core.TyperCommand`."""
        parameters = {} if self.callback is None else inspect.signature(self.callback, eval_str=True).parameters
        with _reporting_usage(_program(info_name, parent), args, parameters):
            return super().make_context(info_name, args, parent, **extra)


class ReportingGroup(TyperGroup):
    """The group of such commands. It says that Ctrl-C came, where a command has not said what that leaves."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """See `typer.core.TyperGroup`."""
        with _reporting_usage(_program(info_name, parent), args, {}):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """See `typer.core.TyperGroup`."""
        try:
            return super().invoke(ctx)
        except ToldInterrupt:
            raise
        except KeyboardInterrupt:
            to_stderr("interrupted", "yellow")
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See `typer.core.TyperGroup`."""
        with _reporting_usage(ctx.command_path, args, {}, commands=self.commands):
            return super().resolve_command(ctx, args)


def _program(name: str | None, parent: Any) -> str:
    return " ".join(filter(None, (parent and parent.command_path, name)))


@contextlib.contextmanager
def _reporting_usage(
    program: str,
    words: Sequence[str],
    parameters: Mapping[str, inspect.Parameter],
    *,
    commands: Iterable[str] = (),
) -> Iterator[None]:
    """Report words that are no options of a command, or no values of them."""
    words = list(words)  # typer takes them out of its list
    try:
        yield
    except exceptions.NoArgsIsHelpError:
        raise
    except exceptions.UsageError as error:
        if commands:
            unknown = unknown_name("COMMAND", words[0], commands)
            report(broken_rule("`COMMAND`", unknown.rule, unknown.value), unknown.remedy)
        else:
            report(*_usage(error, program, words, parameters))
        raise typer.Exit(error.exit_code) from error


def _usage(
    error: Any, program: str, words: Sequence[str], parameters: Mapping[str, inspect.Parameter]
) -> tuple[str, str]:
    """The message and the remedy for one of typer's errors."""
    describes = f"{program} --help describes it."
    match error:
        case exceptions.NoSuchOption(option_name=name, possibilities=close):
            remedy = f"Did you mean {' or '.join(close)}?" if close else f"{program} --help lists them."
            return f"`{name}` must be an option of {program}, but is none.", remedy
        case exceptions.BadOptionUsage(option_name=name):
            has_value = any(word.startswith(f"{name}=") for word in words)
            return f"`{name}` must have {'no value, but has one' if has_value else 'a value, but has none'}.", describes
        case exceptions.MissingParameter(param=param) if param is not None and param.name in parameters:
            name = typed_name(parameters[param.name])
            return f"`{name}` must be given, but is None.", f"Add {name}: {describes}"
        case exceptions.BadParameter(param=param) if param is not None and param.name in parameters:
            found = _wrong_value(parameters[param.name], words, describes)
            if found is not None:
                return broken_rule(f"`{found.field}`", found.rule, found.value), found.remedy
    return f"{error.format_message().rstrip('.')}.", f"{program} --help lists what there is; quote texts with spaces."


def _wrong_value(parameter: inspect.Parameter, words: Sequence[str], describes: str) -> ConfigError | None:
    """The error for an option's value that is not what its annotation says; `None` where that says nothing of it."""
    name, info, kind = typed_name(parameter), parameter_info(parameter), _kind(parameter.annotation)
    pairs = [(word.partition("="), after) for word, after in itertools.pairwise([*words, ""])]
    typed = [value if equals else after for (key, equals, value), after in pairs if key.replace("_", "-") == name]
    if not typed and isinstance(info, OptionInfo) and isinstance(info.envvar, str):
        name, typed = info.envvar, [os.environ.get(info.envvar, "")]
    if not typed or info is None:
        return None
    if get_origin(kind) is Literal:
        return unknown_name(name, typed[-1], get_args(kind))
    if kind not in NUMBERS:
        return None
    least, most = info.min, info.max
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    default = parameter.default
    remedy = describes if default in (None, inspect.Parameter.empty) else f"The default is {default}."
    values = [_number(text, kind) for text in typed]
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    wrong = next((value for value in values if isinstance(value, str) or not low <= value <= high), values[-1])
    return ConfigError(name, f"must be {NUMBERS[kind]}{bounds}", wrong, remedy)


def _number(text: str, kind: Any) -> Any:
    """The number that a text is; the text where it is none."""
    try:
        return kind(text)
    except ValueError:
        return text


def _kind(annotation: Any) -> Any:
    """What one value is: `int` for `Annotated[list[int] | None, ...]`."""
    while get_origin(annotation) is not Literal and (inner := get_args(annotation)):
        annotation = next(part for part in inner if part is not types.NoneType)
    return annotation
