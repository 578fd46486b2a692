"""Options in dataclasses: where a command has a parameter of such a class, its fields are the options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its parameters that are dataclasses, in their places."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    groups = {parameter.name: parameter.annotation for parameter in parameters if _is_group(parameter)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    options = [option for parameter in parameters for option in _options(parameter)]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # read by typer
    return run


def _is_group(parameter: inspect.Parameter) -> bool:
    return dataclasses.is_dataclass(parameter.annotation)


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The parameter itself, or those of its fields; all by name, so that one without a default may follow any."""
    if not _is_group(parameter):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(parameter.annotation, include_extras=True)
    for field in dataclasses.fields(parameter.annotation):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
