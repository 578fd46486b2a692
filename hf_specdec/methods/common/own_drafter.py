"""A drafter of the user's own as the value of `spec_method`: an instance, its class, or what makes one."""

import inspect
from collections.abc import Callable
from typing import Any

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.drafter import BaseDrafter


def maker_of(value: Any) -> Callable[[], BaseDrafter]:
    """Finds the function that makes the drafter of a sequence; of an instance always that one.

    Raises:
        ConfigError: `value` is neither a `Drafter` nor callable without arguments, or its class lacks methods. The
            maker raises it where what was made is no `Drafter`.
    """
    if isinstance(value, BaseDrafter):
        return lambda: value
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise ConfigError("spec_method", f"must define {missing}", value, "See the methods of hf_specdec.Drafter.")
    if _needs_arguments(value):
        raise ConfigError("spec_method", "must be callable without arguments", value, "Wrap it in a lambda.")

    def make() -> BaseDrafter:
        made = value()
        if not isinstance(made, BaseDrafter):
            raise ConfigError("spec_method", "must return a Drafter", made, "Subclass hf_specdec.Drafter.")
        return made

    return make


def _needs_arguments(make: Callable[..., Any]) -> bool:
    """True if a callable has parameters without a default; `False` where it does not tell, as built-in types."""
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        return isinstance(error, TypeError)
    return False
