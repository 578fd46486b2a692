"""What one call asks for: method and configuration, out of arguments, generation configuration and model defaults.

Arguments win over the generation configuration of the call, that wins over the model's, and that over what
`enable` was given. Everything a user can get wrong is found here, before the model is touched.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hf_specdec.common.observer import SpecStep
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method
from hf_specdec.methods.common.own_drafter import maker_of
from hf_specdec.methods.registry import METHODS, config_arguments, resolve
from hf_specdec.request.assisted_arguments import ASSISTED_ARGUMENTS, method_of, with_theirs
from hf_specdec.request.draft_arguments import assistant_model_of, tokenizers_of

Observer = Callable[[SpecStep], None]


class _Unnamed(str):
    """A method that is used where the caller names none."""


AUTO: str = _Unnamed("auto")
NONE = "none"  # `None` as text: transformers' own loop, and nothing drafted where a batch has no other loop
DRAFT_BUDGET = 64  # for a drafter of the user's own, which has no configuration here


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `make_drafter(context)` gives the drafter of one sequence.

    Attributes:
        method (`Method | None`): `None` for a drafter of the user's own.
        assistant_model: the draft model, for methods that take one.
        is_default (`bool`): whether the method comes from a generation configuration, not from the call itself. A
            default that cannot be honoured decodes plainly.
        tokenizers: the target's and the draft model's, where they differ.
    """

    method: Method | None
    config: SpecConfig
    budget: int
    make_drafter: Callable[[DrafterContext], BaseDrafter]
    observer: Observer | None = None
    assistant_model: Any = None
    is_default: bool = False
    tokenizers: tuple[Any, Any] | None = None

    @property
    def name(self) -> str | None:
        """The method's name."""
        return None if self.method is None else self.method.name

    @property
    def callers(self) -> tuple[Any, ...]:
        """What runs code of the caller's between the forwards."""
        own_drafter = self.make_drafter if self.method is None else None
        return tuple(one for one in (self.observer, own_drafter) if one is not None)

    def check_draft_model(self, field: str = "assistant_model", hint: str = "") -> None:
        """Raise where the method needs a draft model and the call brings none, or two ways to draft.

        Args:
            field: what the call names the draft model.
            hint: comes before the remedy where it is missing.

        Raises:
            ConfigError: `assistant_model` is missing, or comes with `exit_layer`.
        """
        method = self.method
        if method is not None and method.needs_draft_head and self.assistant_model is None:
            rule = f'must be given with spec_method="{method.name}"'
            remedy = f"{hint}Pass hf_specdec.AutoDraftHead.from_pretrained(path) of a head for this model."
            raise ConfigError(field, rule, None, remedy)
        layers = self.config.drafting_layers
        if layers is not None and self.assistant_model is not None:
            remedy = "Give only one of the two."
            raise ConfigError("exit_layer", "must be unset with an assistant_model", layers, remedy)
        if method is not None and method.needs_draft_model and self.assistant_model is None and layers is None:
            rule = f'must be given with spec_method="{method.name}"'
            first_layers = 'spec_config={"exit_layer": ...} or hf_specdec.self_draft(model, layers=...)'
            remedy = (
                f"{hint}Pass a smaller model of the same vocabulary, or draft with the first layers: {first_layers}."
            )
            raise ConfigError(field, rule, None, remedy)


def own_arguments() -> tuple[str, ...]:
    """Names of the arguments that this package adds to `generate`."""
    return ("spec_method", "spec_config", "spec_observer", *config_arguments())


def configs_of(model: Any, kwargs: Mapping[str, Any]) -> list[GenerationConfig]:
    """Generation configurations of a call, the one that counts most first."""
    return [config for config in (kwargs.get("generation_config"), model.generation_config) if config is not None]


def check_method(kwargs: Mapping[str, Any]) -> None:
    """Raise for a method that is none, or a wrong configuration of it, before a model is there.

    Raises:
        ConfigError: as when `generate` is called with these arguments.
    """
    given = {name: kwargs[name] for name in config_arguments() if kwargs.get(name) is not None}
    value = kwargs.get("spec_method") or (config_arguments()[next(iter(given))].name if given else NONE)
    if isinstance(value, str) and value != NONE:
        method = resolve(value)
        method.config_class.parse(
            _one_config(method, kwargs.get("spec_config"), given), next(iter(given), "spec_config")
        )


def with_default_method(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for a call that always has a method.

    It is their own, that of a method's argument or of transformers' speculation among them; else `spec_method` is left
    out where a generation configuration names one, and "auto" where none does.
    """
    methods = config_arguments()
    if not isinstance(kwargs.get("spec_method", AUTO), _Unnamed):
        return dict(kwargs)
    given = (methods[name].name for name, value in kwargs.items() if name in methods and value is not None)
    named = next(given, None) or method_of(kwargs)
    if named is None and _configured_method(configs_of(model, kwargs)) is not None:
        return {name: value for name, value in kwargs.items() if name != "spec_method"}
    return {**kwargs, "spec_method": named or AUTO}


def with_own_method(model: Any, kwargs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a job with those of one prompt over them, as for `with_default_method`.

    A prompt's own method leaves aside the configuration of the job's, and its draft model where it takes none.

    Raises:
        ConfigError: there is no such method.
    """
    methods = config_arguments()
    given = (methods[name].name for name, value in own.items() if name in methods and value is not None)
    by_argument = next(given, method_of(own))
    if "spec_method" not in own and by_argument is not None:
        own = {"spec_method": by_argument, **own}
    together = with_default_method(model, {**kwargs, **own})
    named, usual = (_method_value(dict(call), configs_of(model, call), {}) for call in (together, kwargs))
    method, of_job = (resolve(value) if isinstance(value, str) else value for value in (named, usual))
    if method is None or method is of_job:
        return together
    left = {"spec_config", *methods}
    if isinstance(of_job, Method):
        left |= of_job.config_class.transformers_arguments.keys()
    if not isinstance(method, Method) or not (method.takes_draft_model or method.takes_draft_head):
        left |= {"assistant_model", "assistant_tokenizer"}
    return {name: value for name, value in together.items() if name in own or name not in left}


def for_batch(model: Any, kwargs: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As `with_default_method`, or `with_own_method`; with the method that drafts nothing where none is asked for."""
    kwargs = with_default_method(model, kwargs) if own is None else with_own_method(model, kwargs, own)
    if _method_value(dict(kwargs), configs_of(model, kwargs), {}) is None:
        kwargs["spec_method"] = "plain"
    return kwargs


def without_drafts(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the method that drafts nothing."""
    drafts = {"assistant_model", "assistant_tokenizer", *ASSISTED_ARGUMENTS}
    names = {*own_arguments(), *drafts} - {"spec_observer"}
    return {**{name: value for name, value in kwargs.items() if name not in names}, "spec_method": "plain"}


def read_request(
    kwargs: dict[str, Any], configs: list[GenerationConfig], defaults: Mapping[str, SpecConfig]
) -> Request | None:
    """Take the speculation arguments out of `kwargs` and combine them with what the configurations say.

    Args:
        kwargs: arguments of `generate`; ours are removed.
        configs: generation configurations, the one that counts most first.
        defaults: configurations given to `enable`, by method name.

    Returns:
        The request, or `None` where plain generation is asked for.
    """
    observer = kwargs.pop("spec_observer", None)
    if observer is not None and not callable(observer):
        raise ConfigError("spec_observer", "must be callable", observer, "Pass a function of one SpecStep.")
    given = {name: kwargs.pop(name) for name in config_arguments() if name in kwargs}
    given = {name: value for name, value in given.items() if value is not None}
    config = kwargs.pop("spec_config", None)
    is_default = kwargs.get("spec_method") is None and not given and config is None
    method_value = _method_value(kwargs, configs, given)
    if method_value is None:
        _check_plain(config, given, observer, kwargs)
        return None
    if not isinstance(method_value, (str, Method)):
        return _own_drafter(method_value, config, given, observer)
    method = method_value if isinstance(method_value, Method) else resolve(method_value)
    config = _one_config(method, config, given)
    field = next(iter(given), "spec_config")
    if config is None:
        config, field = _configured(method, configs)
    if config is None:
        field = "spec_config"
        config = defaults.get(method.name)
    config = with_theirs(method, config, kwargs, configs)
    parsed = method.config_class.parse(config, field)
    if (reserved := defaults.get(method.name)) is not None:
        parsed.check_within(reserved, field)
    if observer is not None and parsed.engine == "assisted":
        remedy = 'Leave it out, or use engine="loop": transformers\' loop has no steps to show.'
        raise ConfigError("spec_observer", 'must be unset with engine="assisted"', observer, remedy)
    assistant = assistant_model_of(kwargs, method, parsed)
    tokenizers = None if assistant is None else tokenizers_of(kwargs, assistant, parsed)
    return Request(
        method=method,
        config=parsed,
        budget=parsed.node_budget if tokenizers is None else parsed.translated_budget,
        make_drafter=lambda context: method.make(parsed, context),
        observer=observer,
        assistant_model=assistant,
        is_default=is_default,
        tokenizers=tokenizers,
    )


def _check_plain(config: Any, given: Mapping[str, Any], observer: Observer | None, kwargs: Mapping[str, Any]) -> None:
    """Raise where a call without a method has what only a method could use."""
    if config is not None or given:
        name = "spec_config" if config is not None else next(iter(given))
        value = given[name] if config is None else config
        method_name = config_arguments()[name].name if config is None else "prompt_lookup"
        raise ConfigError(name, "must come with a spec_method", value, f'Add spec_method="{method_name}".')
    if observer is not None:
        remedy = 'Add spec_method="plain" to see steps without drafts.'
        raise ConfigError("spec_observer", "must come with a spec_method", observer, remedy)
    if isinstance(head := kwargs.get("assistant_model"), DraftHead):
        remedy = f'Add spec_method="{head.methods[0]}", or leave the head out.'
        raise ConfigError("spec_method", "must be given with a draft head as assistant_model", None, remedy)


def _method_value(kwargs: dict[str, Any], configs: list[GenerationConfig], given: Mapping[str, Any]) -> Any:
    """The argument, be it `None`; else the method of a method's argument; else what the configurations say."""
    if "spec_method" in kwargs:
        value = kwargs.pop("spec_method")
    elif given:
        value = config_arguments()[next(iter(given))].name
    else:
        value = _configured_method(configs)
    return None if isinstance(value, str) and value == NONE else value


def _configured_method(configs: list[GenerationConfig]) -> Any:
    """The method of the first generation configuration that has one, by its name or by a method's argument."""
    for config in configs:
        if (value := getattr(config, "spec_method", None)) is not None:
            return value
        if not hasattr(config, "spec_method") and (named := _named_arguments(config)):
            return config_arguments()[next(iter(named))].name
    return None


def _named_arguments(config: GenerationConfig) -> dict[str, Any]:
    """Configurations under the names of methods' arguments, as `lookahead_config`."""
    found = {name: getattr(config, name, None) for name in config_arguments()}
    return {name: value for name, value in found.items() if value is not None}


def _configured(method: Method, configs: list[GenerationConfig]) -> tuple[Any, str]:
    """The first configuration in a generation configuration that is not meant for another method, and its field."""
    for config in configs:
        value, name = getattr(config, "spec_config", None), getattr(config, "spec_method", None)
        if value is not None and (name is None or (name != NONE and resolve(name) is method)):
            return value, "generation_config.spec_config"
        for name, value in _named_arguments(config).items():
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


def _own_drafter(value: Any, config: Any, given: Mapping[str, Any], observer: Observer | None) -> Request:
    """A `Drafter`, its class, or a function without arguments that returns one."""
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
        observer=observer,
    )
