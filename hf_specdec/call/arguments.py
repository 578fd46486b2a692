"""Reads the arguments of `generate` into a `Request`.

Arguments win over the generation configuration of the call, that over the model's, and that over what `enable` was
given. Errors of one argument are raised here; `rules` has those that depend on several arguments or on the model.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.assisted_arguments import ASSISTED_ARGUMENTS, method_instead, replaced_arguments
from hf_specdec.call.draft_arguments import read_draft
from hf_specdec.call.request import Observer, Request, Settings
from hf_specdec.compat.settings import known_settings
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter, maker_of
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import METHODS, config_arguments, resolve


class _Unnamed(str):
    """A method that is used where neither the call nor a generation configuration names one."""


AUTO: str = _Unnamed("auto")
NONE = "none"  # `None` as text: transformers' own loop
PLAIN = "plain"
DRAFT_BUDGET = 64  # for a drafter of the user's own, which has no configuration here
DRAFTS = ("assistant_model", "assistant_tokenizer")


def own_arguments() -> tuple[str, ...]:
    """Names of the arguments that this package adds to `generate`."""
    return ("spec_method", "spec_config", "spec_observer", *config_arguments())


@functools.cache
def _usual_names() -> frozenset[str]:
    """Names that most calls of `generate` have."""
    names = {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig())}
    return frozenset(names | {"input_ids", "attention_mask", "tokenizer", "assistant_tokenizer"})


def check_spelling(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raise for an argument of this package that is misspelt.

    Raises:
        ConfigError: names the nearest argument that there is.
    """
    for name in arguments.keys() - _usual_names() - set(own := own_arguments()):
        close = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
        if close and name not in known_settings(model):
            raise ConfigError(name, "must be an argument of generate", arguments[name], f"Did you mean {close[0]!r}?")


def named_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments under the names that `function` gives them, the cache under its new one.

    Raises:
        TypeError: one is given by position and by name.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        function = GenerationMixin.generate
        args = (None, *args)
    named = dict(inspect.signature(function).bind_partial(*args).arguments)
    named.pop("self", None)
    if doubled := named.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument {min(doubled)!r}")
    return compat.under_new_name({**named, **kwargs})


def read_request(model: PreTrainedModel, settings: Settings) -> Request | None:
    """Everything that a call asks for; `None` where it asks for plain generation.

    Raises:
        ConfigError: an argument of this package cannot be, or does not go with the method.
    """
    arguments = dict(settings.arguments)
    observer, config = arguments.pop("spec_observer", None), arguments.pop("spec_config", None)
    if observer is not None and not callable(observer):
        raise ConfigError("spec_observer", "must be callable", observer, "Pass a function of one SpecStep.")
    given = _method_configs(arguments)
    value, is_default = _method_of(settings)
    for name in ("spec_method", *config_arguments()):
        arguments.pop(name, None)
    if value is None:
        _check_plain(config, given, observer, arguments)
        return None
    if not isinstance(value, (str, Method)):
        return _of_own_drafter(value, config, given, observer, Settings(arguments, settings.given, settings.own))
    method = value if isinstance(value, Method) else resolve(value)
    parsed = _parsed_config(method, config, given, arguments, settings, state_of(model).defaults)
    if observer is not None and parsed.engine == "assisted":
        remedy = 'Leave it out, or use engine="loop": transformers\' loop has no steps to show.'
        raise ConfigError("spec_observer", 'must be unset with engine="assisted"', observer, remedy)
    assistant, tokenizers = read_draft(arguments, method, parsed)
    return Request(
        method=method,
        config=parsed,
        budget=parsed.node_budget if tokenizers is None else parsed.translated_budget,
        make_drafter=lambda context: method.make(parsed, context),
        settings=Settings(arguments, settings.given, settings.own),
        observer=observer,
        assistant_model=assistant,
        is_default=is_default and config is None,
        tokenizers=tokenizers,
        extra_columns=parsed.step_budget - parsed.node_budget,
    )


def read_prompt_request(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Request:
    """As `read_request`, for a call that always has a method, see `with_method`."""
    request = read_request(model, Settings.of(model, with_method(model, arguments)))
    assert request is not None
    return request


def with_method(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the method that drafts nothing where they ask for none."""
    is_plain = _method_of(Settings.of(model, arguments))[0] is None
    return {**arguments, "spec_method": PLAIN} if is_plain else dict(arguments)


def plain_request(model: PreTrainedModel, request: Request) -> Request:
    """The same call with the method that drafts nothing."""
    left = request.settings.without(*DRAFTS, *ASSISTED_ARGUMENTS)
    return read_prompt_request(model, left | {"spec_method": PLAIN, "spec_observer": request.observer})


def without_drafts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the method that drafts nothing."""
    names = {*own_arguments(), *DRAFTS, *ASSISTED_ARGUMENTS} - {"spec_observer"}
    return {**{name: value for name, value in arguments.items() if name not in names}, "spec_method": PLAIN}


def with_own_method(model: PreTrainedModel, usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of many calls with those of one call over them.

    A method of the call's own leaves aside the configuration of the others, and their draft where it takes none.

    Raises:
        ConfigError: there is no such method.
    """
    by_argument = _named_by(own)
    if "spec_method" not in own and by_argument is not None:
        own = {"spec_method": by_argument, **own}
    together = {**usual, **own}
    named, of_others = (_method_of(Settings.of(model, call))[0] for call in (together, usual))
    method, other = (resolve(value) if isinstance(value, str) else value for value in (named, of_others))
    if method is None or method is other:
        return together
    left = {"spec_config", *config_arguments()}
    if isinstance(other, Method):
        left |= other.config_class.transformers_arguments.keys()
    if not isinstance(method, Method) or not (method.takes_draft_model or method.takes_draft_head):
        left |= {*DRAFTS}
    return {name: value for name, value in together.items() if name in own or name not in left}


def check_method(arguments: Mapping[str, Any]) -> None:
    """Raise for a method that is none, or a wrong configuration of it, before a model is there.

    Raises:
        ConfigError: as when `generate` is called with these arguments.
    """
    given = _method_configs(arguments)
    value = arguments.get("spec_method") or _named_by(given) or NONE
    if isinstance(value, str) and value != NONE:
        method = resolve(value)
        config = _one_config(method, arguments.get("spec_config"), given)
        method.config_class.parse(config, next(iter(given), "spec_config"))


def _method_of(settings: Settings) -> tuple[Any, bool]:
    """The method that a call asks for, and whether a generation configuration does: `spec_method`, be it `None`.

    Else that of a method's argument, of transformers' own speculation where a default is given, of the configurations,
    of a draft head as `assistant_model`, or the default.
    """
    arguments = settings.arguments
    value, is_default = arguments.get("spec_method"), False
    has_default = isinstance(value, _Unnamed)
    if "spec_method" not in arguments or has_default:
        by_argument = _named_by(arguments) if has_default else _named_by(_method_configs(arguments))
        if by_argument is not None:
            value = by_argument
        elif (configured := _configured_method(settings)) is not None:
            value, is_default = configured, True
        elif not has_default and isinstance(head := arguments.get("assistant_model"), DraftHead):
            value = head.methods[0]
    return None if isinstance(value, str) and value == NONE else value, is_default


def _named_by(arguments: Mapping[str, Any]) -> str | None:
    """The method of an argument that carries its configuration, or of transformers' own speculation."""
    given = _method_configs(arguments)
    return config_arguments()[next(iter(given))].name if given else method_instead(arguments)


def _method_configs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Configurations under the names of methods' arguments, as `lookahead_config`."""
    methods = config_arguments()
    return {name: value for name, value in values.items() if name in methods and value is not None}


def _configured_method(settings: Settings) -> Any:
    """The method of the first generation configuration that has one, by its name or by a method's argument."""
    for config in settings.configs:
        if (value := getattr(config, "spec_method", None)) is not None:
            return value
        if not hasattr(config, "spec_method") and (named := _method_configs(vars(config))):
            return config_arguments()[next(iter(named))].name
    return None


def _parsed_config(
    method: Method,
    config: Any,
    given: Mapping[str, Any],
    arguments: dict[str, Any],
    settings: Settings,
    defaults: Mapping[str, SpecConfig],
) -> SpecConfig:
    """The method's configuration: the call's, that of a generation configuration, or the one `enable` was given.

    Args:
        arguments: those of transformers' speculation that the method takes over are removed.
    """
    config, field = _one_config(method, config, given), next(iter(given), "spec_config")
    if config is None:
        config, field = _configured(method, settings)
    if config is None:
        config, field = defaults.get(method.name), "spec_config"
    parsed = method.config_class.parse(replaced_arguments(method, config, arguments, settings), field)
    if (reserved := defaults.get(method.name)) is not None:
        parsed.check_within(reserved, field)
    return parsed


def _configured(method: Method, settings: Settings) -> tuple[Any, str]:
    """The first configuration in a generation configuration that is not meant for another method, and its field."""
    for config in settings.configs:
        value, name = getattr(config, "spec_config", None), getattr(config, "spec_method", None)
        if value is not None and (name is None or (name != NONE and resolve(name) is method)):
            return value, "generation_config.spec_config"
        for name, value in _method_configs(vars(config)).items():
            if name in method.config_arguments:
                return value, f"generation_config.{name}"
    return None, ""


def _one_config(method: Method, config: Any, given: Mapping[str, Any]) -> Any:
    """The configuration among `spec_config` and the arguments named after a method."""
    for name, value in given.items():
        if name not in method.config_arguments:
            remedy = f"Pass it with spec_method={config_arguments()[name].name!r}."
            raise ConfigError(name, f"must not come with spec_method={method.name!r}", value, remedy)
        if config is not None:
            raise ConfigError(name, "must not come with another configuration", value, "Give only one of them.")
        config = value
    return config


def _check_plain(
    config: Any, given: Mapping[str, Any], observer: Observer | None, arguments: Mapping[str, Any]
) -> None:
    """Raise where a call without a method has what only a method could use."""
    if config is not None or given:
        name = "spec_config" if config is not None else next(iter(given))
        value = given[name] if config is None else config
        method_name = config_arguments()[name].name if config is None else "prompt_lookup"
        raise ConfigError(name, "must come with a spec_method", value, f'Add spec_method="{method_name}".')
    if observer is not None:
        remedy = 'Add spec_method="plain" to see steps without drafts.'
        raise ConfigError("spec_observer", "must come with a spec_method", observer, remedy)
    if isinstance(head := arguments.get("assistant_model"), DraftHead):
        remedy = f'Add spec_method="{head.methods[0]}", or leave the head out.'
        raise ConfigError("spec_method", "must be given with a draft head as assistant_model", None, remedy)


def _of_own_drafter(
    value: Any, config: Any, given: Mapping[str, Any], observer: Observer | None, settings: Settings
) -> Request:
    """The request for a `Drafter`, its class, or a function without arguments that returns one."""
    config_class = value if isinstance(value, type) else type(value)
    if named := [name for name, method in METHODS.items() if method.config_class is config_class]:
        remedy = f'Write spec_method="{named[0]}", and pass the configuration as spec_config.'
        raise ConfigError("spec_method", "must be a name or a Drafter, not a configuration", value, remedy)
    if not callable(value) and not isinstance(value, BaseDrafter):
        names = ", ".join(repr(name) for name in METHODS)
        raise ConfigError("spec_method", f"must be one of {names} or a Drafter", value, "See hf_specdec.Drafter.")
    if config is not None or given:
        rule = "must be unset for a drafter of your own"
        raise ConfigError("spec_config", rule, given if config is None else config, "Configure the drafter itself.")
    make = maker_of(value)
    return Request(
        method=None,
        config=SpecConfig(),
        budget=DRAFT_BUDGET,
        make_drafter=lambda context: make(),
        settings=settings,
        observer=observer,
        extra_columns=int(getattr(value, "max_extra_tokens", 0)),
    )
