"""Reads the arguments of `generate` into a `Request`.

Arguments win over the generation configuration of the call, that over the model's, and that over what `enable` was
given. Errors of one argument are raised here; `rules` has those that depend on several arguments or on the model.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.call.request import Request
from hf_specdec.compat.caches import under_new_name
from hf_specdec.engine.draft_pairing import read_draft
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter, maker_of
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import METHODS, config_arguments, resolve


class DefaultMethod:
    """Value of `spec_method` that stands for `"auto"` where nothing else in a call names a method."""

    def __repr__(self) -> str:
        return "'auto'"


AUTO = DefaultMethod()
NONE = "none"  # `None` as text: transformers' own loop
PLAIN = "plain"
DRAFT_BUDGET = 64  # for a drafter of the user's, which has no configuration here
# These choose transformers' own speculation, or change its texts, a generation configuration's too.
MODES = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)
TUNING = (  # do nothing by themselves, here neither where a generation configuration has them
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)
ASSISTED_ARGUMENTS = (*MODES, *TUNING)
DRAFTS = ("assistant_model", "assistant_tokenizer")


def added_arguments() -> tuple[str, ...]:
    """Names of the arguments that this package adds to `generate`."""
    return ("spec_method", "spec_config", "spec_observer", *config_arguments())


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
    return under_new_name({**named, **kwargs})


def read_request(unread: Request) -> Request:
    """The request with its method, configuration and draft; as it is where the call has no method.

    Raises:
        ConfigError: an argument of this package cannot be, or does not go with the method.
    """
    arguments = dict(unread.arguments)
    observer, config = arguments.pop("spec_observer", None), arguments.pop("spec_config", None)
    if observer is not None and not callable(observer):
        raise ConfigError("spec_observer", "must be callable", observer, "Pass a function of one SpecStep.")
    named_configs = _named_configs(arguments)
    value, is_default = _method_of(unread)
    if value is None:
        _check_plain(unread, named_configs)
        return unread
    for name in ("spec_method", *config_arguments()):
        arguments.pop(name, None)
    request = replace(unread, arguments=arguments, observer=observer)
    if not isinstance(value, str):
        return _with_users_drafter(request, value, (named_configs or None) if config is None else config)
    method = resolve(value)
    parsed = _parsed_config(unread, method, config)
    if observer is not None and parsed.engine == "assisted":
        remedy = 'Leave it out, or use engine="loop": transformers\' loop has no steps to show.'
        raise ConfigError("spec_observer", 'must be unset with engine="assisted"', observer, remedy)
    assistant, tokenizers = None, None
    if method.takes_draft_model or method.takes_draft_head:
        assistant = arguments.pop("assistant_model", None)
    if assistant is not None:
        assistant, tokenizers = read_draft(arguments, method, parsed, assistant)
    return replace(
        request,
        method=method,
        config=parsed,
        budget=parsed.node_budget if tokenizers is None else parsed.translated_budget,
        extra_columns=parsed.step_budget - parsed.node_budget,
        assistant_model=assistant,
        tokenizers=tokenizers,
        is_default=is_default and config is None,
    )


def read_prompt_request(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Request:
    """As `read_request`, for a call that always has a method, see `with_method`."""
    return read_request(Request.of(model, with_method(model, arguments)))


def with_method(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the method that drafts nothing where they ask for none."""
    is_plain = _method_of(Request.of(model, arguments))[0] is None
    return {**arguments, "spec_method": PLAIN} if is_plain else dict(arguments)


def plain_request(request: Request) -> Request:
    """The same call with the method that drafts nothing."""
    left = request.without(*DRAFTS, *ASSISTED_ARGUMENTS)
    return read_prompt_request(request.model, left | {"spec_method": PLAIN, "spec_observer": request.observer})


def check_method(arguments: Mapping[str, Any]) -> None:
    """Raise for a method that is none, or a wrong configuration of it, before a model is there.

    Raises:
        ConfigError: as when `generate` is called with these arguments.
    """
    value = arguments.get("spec_method") or _named_method(arguments) or NONE
    if isinstance(value, str) and value != NONE:
        method, configs = resolve(value), _named_configs(arguments)
        config = _only_config(method, arguments.get("spec_config"), configs)
        method.config_class.parse(config, next(iter(configs), "spec_config"))


def _method_of(request: Request) -> tuple[Any, bool]:
    """The method that a call names, by an argument before a generation configuration, and whether the latter does."""
    arguments = request.arguments
    value, is_default = arguments.get("spec_method"), False
    has_default = isinstance(value, DefaultMethod)
    if "spec_method" not in arguments or has_default:
        named = _named_method(arguments)
        if named is not None:
            value = named
        elif (configured := _configured_method(request)) is not None:
            value, is_default = configured, True
        elif not has_default and isinstance(head := arguments.get("assistant_model"), DraftHead):
            value = head.methods[0]
        else:
            value = "auto" if has_default else None
    return None if isinstance(value, str) and value == NONE else value, is_default


def _named_configs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Configurations under the names of methods' arguments, as `lookahead_config`."""
    methods = config_arguments()
    return {name: value for name, value in values.items() if name in methods and value is not None}


def _named_method(arguments: Mapping[str, Any]) -> str | None:
    """The method of an argument that carries its configuration."""
    configs = _named_configs(arguments)
    return config_arguments()[next(iter(configs))].name if configs else None


def _configured_method(request: Request) -> Any:
    """The method of the first generation configuration that has one, by its name or by a method's argument."""
    for config in request.configs:
        if (value := getattr(config, "spec_method", None)) is not None:
            return value
        if not hasattr(config, "spec_method") and (configs := _named_configs(vars(config))):
            return config_arguments()[next(iter(configs))].name
    return None


def _parsed_config(unread: Request, method: Method, config: Any) -> SpecConfig:
    """The method's configuration: the call's, that of a generation configuration, or the one `enable` was given."""
    named_configs = _named_configs(unread.arguments)
    config, field = _only_config(method, config, named_configs), next(iter(named_configs), "spec_config")
    if config is None:
        config, field = _configured(unread, method)
    reserved = state_of(unread.model).defaults.get(method.name)
    if config is None:
        config, field = reserved, "spec_config"
    parsed = method.config_class.parse(config, field)
    if reserved is not None:
        parsed.check_within(reserved, field)
    return parsed


def _configured(request: Request, method: Method) -> tuple[Any, str]:
    """The first configuration in a generation configuration that is not meant for another method, and its field."""
    for config in request.configs:
        value, name = getattr(config, "spec_config", None), getattr(config, "spec_method", None)
        if value is not None and (name is None or (name != NONE and resolve(name) is method)):
            return value, "generation_config.spec_config"
        for name, value in _named_configs(vars(config)).items():
            if name in method.config_arguments:
                return value, f"generation_config.{name}"
    return None, ""


def _only_config(method: Method, config: Any, named_configs: Mapping[str, Any]) -> Any:
    """The configuration among `spec_config` and the arguments named after a method."""
    for name, value in named_configs.items():
        if name not in method.config_arguments:
            remedy = f"Pass it with spec_method={config_arguments()[name].name!r}."
            raise ConfigError(name, f"must not come with spec_method={method.name!r}", value, remedy)
        if config is not None:
            raise ConfigError(name, "must not come with another configuration", value, "Give only one of them.")
        config = value
    return config


def _check_plain(request: Request, named_configs: Mapping[str, Any]) -> None:
    """Raise where a call without a method has what only a method could use."""
    arguments = request.arguments
    for name in ("spec_config", *named_configs, "spec_observer"):
        if (value := arguments.get(name)) is not None:
            method = config_arguments()[name].name if name in named_configs else "auto"
            raise ConfigError(name, "must come with a spec_method", value, f'Add spec_method="{method}".')
    if isinstance(head := arguments.get("assistant_model"), DraftHead):
        remedy = f'Add spec_method="{head.methods[0]}", or leave the head out.'
        raise ConfigError("spec_method", "must be given with a draft head as assistant_model", None, remedy)


def _with_users_drafter(request: Request, value: Any, config: Any) -> Request:
    """The request for a `Drafter`, its class, or a function without arguments that returns one."""
    if not callable(value) and not isinstance(value, BaseDrafter):
        names = ", ".join(repr(name) for name in METHODS)
        raise ConfigError("spec_method", f"must be one of {names} or a Drafter", value, "See hf_specdec.Drafter.")
    if config is not None:
        rule = "must be unset for a drafter of your own"
        raise ConfigError("spec_config", rule, config, "Configure the drafter itself.")
    make, columns = maker_of(value), int(getattr(value, "max_extra_tokens", 0))
    method = Method(name="", config_class=SpecConfig, summary="", make=lambda config, context: make())
    return replace(request, method=method, budget=DRAFT_BUDGET, extra_columns=columns)
