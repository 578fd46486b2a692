"""Everything this package raises on purpose.

SpecError
├── ConfigError (also a ValueError)         a field, its rule, the value given, the remedy
├── UnsupportedModelError (also a ValueError)   the model cannot do what was asked
├── CheckpointError (also an OSError)       a model folder is missing, truncated or not a model
├── QueueFullError                          as many prompts wait for a batch as may
├── RankError (also a RuntimeError)         the processes of a tensor-parallel model disagree, or one of them failed
└── MissingExtraError (also an ImportError)     an optional dependency is not installed
"""

import difflib
import importlib
import traceback
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MissingExtraError",
    "QueueFullError",
    "RankError",
    "SpecError",
    "UnsupportedModelError",
    "counted",
    "first_line",
    "import_extra",
    "shown",
    "unknown_name",
    "without_frames",
]

Error = TypeVar("Error", bound=BaseException)
MOST_SHOWN = 200  # characters of a value in an error


class SpecError(Exception):
    """Base class of the package's errors."""


class ConfigError(SpecError, ValueError):
    """An argument breaks a rule. The message names field, rule, value and remedy.

    Args:
        field (`str`): the argument, as the user writes it.
        rule (`str`): what must hold, starting with "must".
        value (`object`): what was given.
        remedy (`str`): what to do instead.
    """

    def __init__(self, field: str, rule: str, value: object, remedy: str) -> None:
        super().__init__(f"`{field}` {rule}, but is {shown(value)}. {remedy}")
        self.field, self.rule, self.value, self.remedy = field, rule, value, remedy

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str, object, str]]:
        return type(self), (self.field, self.rule, self.value, self.remedy)


def shown(value: object) -> str:
    """`repr(value)` on one line, cut where it is long; the type alone of what cannot be shown."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - nested too deeply, a number of too many digits, or a `__repr__` that raises
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class UnsupportedModelError(SpecError, ValueError):
    """The model has no way to do what was asked; the message says why and what works instead."""


class CheckpointError(SpecError, OSError):
    """A checkpoint folder is missing, incomplete or not a checkpoint."""


class QueueFullError(SpecError):
    """As many prompts wait for a batch as may; the message says how many."""

    def __init__(self, max_queue: int) -> None:
        super().__init__(f"as many prompts wait as may (max_queue is {max_queue}). Try again later.")
        self.max_queue = max_queue

    def __reduce__(self) -> tuple[type["QueueFullError"], tuple[int]]:
        return type(self), (self.max_queue,)


class RankError(SpecError, RuntimeError):
    """The processes of a tensor-parallel model disagree, or one of them failed; the message names what and where."""


class MissingExtraError(SpecError, ImportError):
    """An optional dependency is missing; the message holds the install line.

    Args:
        package (`str`): what is missing.
        extra (`str`): the extra of hf_specdec that installs it.
        purpose (`str`): what needs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.remedy = f'Install it with: pip install "hf_specdec[{extra}]"'
        super().__init__(f"{purpose} needs `{package}`. {self.remedy}")
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[type["MissingExtraError"], tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.purpose)


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """A module of an optional package, called as the package but for hyphens.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0].replace("_", "-"), extra, purpose) from error


def unknown_name(field: str, value: object, known: Iterable[str], aliases: Iterable[str] = ()) -> ConfigError:
    """The error for a name that is none of `known`, with the nearest match, an alias too, as its remedy."""
    names = sorted(known)
    word = value[:MOST_SHOWN].lower() if isinstance(value, str) else ""
    close = difflib.get_close_matches(word, [*names, *aliases], n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Choose one of them."
    return ConfigError(field, f"must be one of {', '.join(map(repr, names))}", value, remedy)


def counted(number: int, noun: str) -> str:
    """`"1 token"`, `"2 tokens"`, `"12,000 tokens"`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: Exception) -> str:
    """First line of another library's error; its type where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def without_frames(error: Error) -> Error:
    """The error with its traceback as a note: frames would keep alive all that they and their callers worked with."""
    led: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (one := waiting.pop()) is not None and id(one) not in led:
            led[id(one)] = one
            waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    if any(one.__traceback__ is not None for one in led.values()):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    for one in led.values():
        one.__traceback__ = None
    return error
