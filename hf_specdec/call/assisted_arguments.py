"""transformers' arguments of assisted generation: a method takes them over, or a call with a method refuses them.

Those that do nothing by themselves in transformers do nothing here either where a generation configuration has them.
"""

from collections.abc import Mapping
from typing import Any

from hf_specdec.call.request import Settings
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import METHODS

# These choose transformers' own speculation, or change its texts, a generation configuration's too.
CHOICES = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
MODES = (*CHOICES, "assistant_ensemble_weight")
TUNING = (
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)
ASSISTED_ARGUMENTS = (*MODES, *TUNING)
STARTING = ("prompt_lookup_num_tokens", "assistant_early_exit")  # would begin transformers' own speculation
INSTEAD = {
    "use_mtp": 'Use spec_method="mtp" in its place.',
    "speculation_type": 'Use spec_method="dflash" in its place.',
    "assistant_ensemble_weight": "Blended probabilities would give other texts.",
    "num_assistant_tokens_schedule": "Drafts end by their confidence_threshold here; 0.0 keeps their length.",
    "assistant_lookbehind": "Drafts are translated from the last word boundary here.",
    "target_lookbehind": "Drafts are translated from the last word boundary here.",
}


def method_instead(arguments: Mapping[str, Any]) -> str | None:
    """The method in whose place transformers' speculation is asked for by an argument; `None` without one."""
    modes = [name for name in MODES if arguments.get(name) is not None]
    takers = (m.name for name in modes for m in METHODS.values() if name in m.config_class.transformers_arguments)
    return next(takers, None)


def replaced_arguments(method: Method, config: Any, arguments: dict[str, Any], settings: Settings) -> Any:
    """The configuration of a method that transformers has too, by the settings there: adding `spec_method` is enough.

    Args:
        config: the configuration of this package that counts, if there is one; it goes before configured settings.
        arguments: of `generate`; those that are taken over are removed.

    Raises:
        ConfigError: an argument comes with a configuration.
    """
    names = method.config_class.transformers_arguments
    settings_taken = {name: value for name in names if (value := arguments.pop(name, None)) is not None}
    if config is not None:
        for name, value in settings_taken.items():
            raise ConfigError(name, "must not come with another configuration", value, "Give only one of them.")
        return config
    configured = {name: value for name in names if (value := settings.configured(name)) is not None}
    return configured | settings_taken or None


def check_taken(settings: Settings, method: Method | None) -> None:
    """Refuse the arguments that the method does not take over.

    Args:
        method: of the call; `None` for a drafter of the user's own.

    Raises:
        ConfigError: names the first of them, and the method that takes it.
    """
    taken = {} if method is None else method.config_class.transformers_arguments
    for name in ASSISTED_ARGUMENTS:
        value = settings(name) if name in MODES else settings.arguments.get(name)
        if name in taken or value is None or value is False:
            continue
        unset = f"pass {name}=None, as a generation configuration sets it, or change it there"
        left_out = "leave it out" if name in settings.arguments else unset
        drafting = "a drafter of your own" if method is None else f'spec_method="{method.name}"'
        remedy = f"{_instead(name)} Else {left_out}, or pass spec_method=None."
        raise ConfigError(name, f"must be unset with {drafting}", value, remedy)
    if (tokenizer := settings.arguments.get("assistant_tokenizer")) is not None:
        rule, remedy = "must come with an assistant_model", "Leave it out, or add one."
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, remedy)


def check_none_asked(arguments: Mapping[str, Any]) -> None:
    """Refuse transformers' own speculation with `custom_generate`, in whose place that would be.

    Args:
        arguments: of a call without a method.

    Raises:
        ConfigError: names the first argument that asks for it.
    """
    for name in CHOICES:
        if arguments.get(name):
            remedy = f"{_instead(name)} Or leave out custom_generate."
            raise ConfigError(name, "must come with a spec_method in custom_generate", arguments[name], remedy)


def _instead(name: str) -> str:
    """Remedy for an argument of transformers' that a call's method does not take."""
    takers = " or ".join(f'"{m.name}"' for m in METHODS.values() if name in m.config_class.transformers_arguments)
    return f"Use spec_method={takers}, which takes it." if takers else INSTEAD[name]
