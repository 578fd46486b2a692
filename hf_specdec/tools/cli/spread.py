"""Options in dataclasses: where a command has a parameter of such a class, its fields are the options.

A field is explained by its `typer.Option`, or by its entry in the docstring of the class.
"""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its parameters that are dataclasses, in their places."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    groups: dict[str, Any] = {
        each.name: each.annotation for each in parameters if dataclasses.is_dataclass(each.annotation)
    }

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            fields = {field.name: _value(field, values.pop(field.name)) for field in dataclasses.fields(group)}
            values[name] = group(**fields)
        command(**values)

    options = [option for each in parameters for option in _options(each, is_group=each.name in groups)]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # read by typer
    return run


def _options(parameter: inspect.Parameter, *, is_group: bool) -> Iterator[inspect.Parameter]:
    """The parameter itself, or those of its fields; all by name, so that one without a default may follow any."""
    if not is_group:
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group := parameter.annotation, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        typed, option = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        if option is None:
            names = [f"--{field.name.replace('_', '-')}"] if hint is bool else []  # no --no-...
            item, option = _item_of(hint), typer.Option(*names)
            typed = hint if item is None else list[item] | None  # type: ignore[valid-type]
        if option.help is None:
            option = copy.copy(option)  # others may have it too
            option.help = _entries(group).get(field.name)
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        hint = Annotated[typed, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _entries(group: type) -> dict[str, str]:
    """The sentences on each field in the docstring of a class."""
    entries, names = dict[str, str](), list[str]()
    for line in str(inspect.getdoc(group)).partition("s:\n")[2].partition("\n\n")[0].splitlines():
        if begin := re.match(r"    (\w[\w, ]*) \(`.*?\):(.*)", line):
            names, line = begin[1].split(", "), begin[2]
        entries |= {name: f"{entries.get(name, '')} {line.strip()}".strip() for name in names}
    return {name: text[0].upper() + text[1:] for name, text in entries.items()}


def _item_of(hint: Any) -> Any:
    """The type of a tuple's items, of which an option takes a list; `None` for any other type."""
    return next((get_args(each)[0] for each in (hint, *get_args(hint)) if get_origin(each) is tuple), None)


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value of a field: a tuple for a list of options, of which none at all is the default."""
    return value if _item_of(field.type) is None else tuple(value or ()) or field.default
