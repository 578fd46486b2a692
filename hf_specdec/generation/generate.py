"""One call of `generate` on its way to a decoding loop: through transformers' own `generate`, with our loop in it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.stats import SpecStats
from hf_specdec.engine.batch_rules import may_keep_state
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain_reasons import transformers_reason
from hf_specdec.errors import ConfigError
from hf_specdec.generation.arguments import (
    Settings,
    bind_stop_strings,
    check_modes,
    check_prompt,
    named_arguments,
    place_models,
    prompt_length,
    settings_of,
    unset,
    with_cache,
    with_whole_lengths,
)
from hf_specdec.generation.bound_decode import BoundDecode, PreparedDecode
from hf_specdec.methods.registry import as_head
from hf_specdec.request.assisted_arguments import ASSISTED_ARGUMENTS, check_none_asked, check_others
from hf_specdec.request.request import Request, configs_of, own_arguments, read_request

STARTING = {"prompt_lookup_num_tokens", "assistant_early_exit"}  # transformers' own speculation, where they are left


def with_own_arguments(signature: inspect.Signature, *others: str) -> inspect.Signature:
    """The signature with our arguments, and `others`, in front of its `**kwargs`."""
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in own_arguments()]
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, kind, default=None) for name in (*own_arguments(), *others)]
    return signature.replace(parameters=[*named, *own, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    spec_streamer: Any = None,
    spec_assistant_model: Any = None,
    **kwargs: Any,
) -> Any:
    """A decoding method for `generate(custom_generate=hf_specdec.decode, spec_method=...)`: nothing is patched.

    Takes the arguments that an enabled model's `generate` takes. transformers drops `streamer`, `assistant_model`,
    `tokenizer` and `assistant_tokenizer` before it calls a function; give the first two under the names below, and
    enable the model for `stop_strings` or a draft with a tokenizer of its own. Settings of assisted generation that a
    configuration of the call has at transformers' own defaults, as `num_assistant_tokens=20`, count as unset.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: from transformers.
        spec_streamer (*optional*): a transformers streamer; it gets the prompt first, as from `generate`.
        spec_assistant_model (`PreTrainedModel`, *optional*): a draft model or head, for the methods that take one.
        kwargs: `spec_method`, `spec_config` and the other arguments of an enabled `generate`; and transformers' own.
    """
    check_modes(settings_of({}, [generation_config]), {})
    prompt = {"input_ids": input_ids, "inputs_embeds": kwargs.get("inputs_embeds")}
    check_prompt(model, prompt, of_decoder=True)
    ours = {name: kwargs.pop(name) for name in (*own_arguments(), *ASSISTED_ARGUMENTS) if name in kwargs}
    ours["assistant_model"] = spec_assistant_model
    given = compat.without_defaults(generation_config, ASSISTED_ARGUMENTS)
    configs = [given, model.generation_config]
    request = read_request(ours, configs, state_of(model).defaults)
    if request is None:
        check_none_asked(ours)
    else:
        check_others(settings_of(ours, configs), ours, request.method)
        _check_dropped(request, generation_config)
        place_models(model, request.assistant_model, request.config, None)
    if spec_streamer is not None:
        spec_streamer.put(input_ids.cpu())
    bound = BoundDecode(request, spec_streamer)
    with bound.ending_streamer():
        return bound(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def _check_dropped(request: Request, config: GenerationConfig) -> None:
    """Refuse what transformers dropped on the way to `decode`, where that can be seen."""
    hint = "transformers drops assistant_model here; its name is spec_assistant_model. "
    request.check_draft_model("spec_assistant_model", hint)
    if getattr(config, "stop_strings", None) is not None:
        remedy = "transformers drops the tokenizer: enable the model, or pass a StopStringCriteria."
        raise ConfigError("stop_strings", "must be unset with custom_generate", config.stop_strings, remedy)


# transformers hands a custom method only those arguments that its signature names.
decode.__signature__ = with_own_arguments(inspect.signature(decode), *ASSISTED_ARGUMENTS)  # type: ignore[attr-defined]


def class_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """`generate` of the model's own class, which decodes without this package."""
    generate: Callable[..., Any] = model.__class__.generate.__get__(model)
    return generate


def generate_once(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """What `generate(**kwargs)` of an enabled model gives, for a model that is not enabled and stays so."""
    return generate_with(model, class_generate(model), (), kwargs)


def prepared_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, Request]:
    """What `model.generate(**kwargs)` would decode, and how: checked, prepared by transformers, nothing computed yet.

    Raises:
        ConfigError: no `spec_method`, or arguments that do not go with one.
    """
    plain, args, kwargs = _unwrapped(state_of(model).own_generate or class_generate(model), (), kwargs)
    kwargs = named_arguments(plain, args, kwargs)
    return _prepared(model, plain, kwargs)


def _prepared(model: PreTrainedModel, plain: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Call, Request]:
    configs = configs_of(model, kwargs)
    request = read_request(kwargs, configs, state_of(model).defaults)
    if request is None:
        raise ConfigError("spec_method", "must be given", None, 'Use "plain" for no drafts.')
    with_cache(model, kwargs)
    try:
        _check(model, request, configs, kwargs)
    except ConfigError as error:
        if not request.is_default:
            raise
        _say_plain(model, str(error))
        for name in (*ASSISTED_ARGUMENTS, "assistant_model", "assistant_tokenizer"):
            unset(model, kwargs, name)
        return _prepared(model, plain, kwargs | {"spec_method": "plain", "spec_observer": request.observer})
    _fill_in(model, request, kwargs)
    prepared: tuple[Call, Request] = _decoded_by(PreparedDecode, model, plain, request, kwargs)
    return prepared


def generate_with(
    model: PreTrainedModel, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`plain(*args, **kwargs)` with our decoding method in it, where one is asked for."""
    plain, args, kwargs = _unwrapped(plain, args, kwargs)
    custom = kwargs.get("custom_generate")
    if isinstance(custom, BoundDecode):
        return plain(*args, **kwargs)
    kwargs = named_arguments(plain, args, kwargs)
    if custom is decode:  # here transformers drops nothing on the way to it
        for name in ("streamer", "assistant_model"):
            if (given := kwargs.pop(f"spec_{name}", None)) is not None:
                kwargs[name] = given
    configs = configs_of(model, kwargs)
    request = read_request(kwargs, configs, state_of(model).defaults)
    if request is None or (request.is_default and compat.is_assistants_call(kwargs)):
        if custom is decode:
            del kwargs["custom_generate"]
        return plain(**kwargs)
    with_cache(model, kwargs)
    try:
        _check(model, request, configs, kwargs)
    except ConfigError as error:
        if not request.is_default:
            raise
        return _plainly(model, plain, request, kwargs, str(error))
    _fill_in(model, request, kwargs)
    reason = transformers_reason(request)
    if reason is not None and not _needs_own_loop(model, configs, kwargs):
        return _by_transformers(model, plain, request, kwargs, reason)
    return _decoded_by(BoundDecode, model, plain, request, kwargs)


def _unwrapped(
    plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call without `functools.partial` around it, so that what that sets is checked too."""
    while isinstance(plain, functools.partial):
        partial: functools.partial[Any] = plain
        plain, args, kwargs = partial.func, (*partial.args, *args), {**partial.keywords, **kwargs}
    return plain, args, kwargs


def _fill_in(model: PreTrainedModel, request: Request, kwargs: dict[str, Any]) -> None:
    """Complete the lengths of a checked call, and place the models where it runs."""
    with_whole_lengths(kwargs)
    place_models(model, request.assistant_model, request.config, kwargs)


def _needs_own_loop(model: PreTrainedModel, configs: list[GenerationConfig], kwargs: dict[str, Any]) -> bool:
    """Whether transformers' assisted generation refuses the call, or gives another result than plain `generate`."""
    return (
        compat.has_virtual_tokens(model)
        or compat.is_recurrent(model)
        or compat.places_adapters(model)
        or not compat.fresh_cache(model)
        or bool(compat.cached_length(compat.given_cache(kwargs)))
        or _is_static(settings_of(kwargs, configs), compat.given_cache(kwargs))
        or may_keep_state(settings_of(kwargs, configs), kwargs.get("logits_processor") or ())
    )


def _is_static(settings: Settings, cache: Any) -> bool:
    """Whether a call decodes over a static cache, which transformers cannot always crop: one with windows, never."""
    inner = getattr(cache, "self_attention_cache", cache)
    return settings("cache_implementation") == "static" or isinstance(inner, compat.StaticCache)


def _decoded_by(
    method: type[BoundDecode],
    model: PreTrainedModel,
    plain: Callable[..., Any],
    request: Request,
    kwargs: dict[str, Any],
) -> Any:
    """`plain(**kwargs)` with a `method` of this call as transformers' `custom_generate`."""
    bind_stop_strings(model, kwargs)
    for name in STARTING:
        unset(model, kwargs, name)
    bound = kwargs["custom_generate"] = method(request, kwargs.get("streamer"))
    with bound.ending_streamer(), bound.reading_encoder(model, kwargs):
        return bound.within(model, plain, kwargs)


def _check(model: PreTrainedModel, request: Request, configs: list[GenerationConfig], kwargs: dict[str, Any]) -> None:
    """Refuse what has no speculative form, before anything is computed."""
    custom = kwargs.get("custom_generate")
    if custom is not None and custom is not decode:
        raise ConfigError(
            "custom_generate", "must be unset with spec_method", custom, "Leave out one of the two for this call."
        )
    request.check_draft_model()
    streamer, methods = kwargs.get("streamer"), ("put", "end")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in methods):
        remedy = "Pass a transformers streamer, such as TextStreamer(tokenizer)."
        raise ConfigError("streamer", "must have the methods put and end", type(streamer).__name__, remedy)
    settings = settings_of(kwargs, configs)
    check_modes(settings, kwargs)
    check_others(settings, kwargs, request.method)
    check_prompt(model, kwargs)


def _plainly(
    model: PreTrainedModel, plain: Callable[..., Any], request: Request, kwargs: dict[str, Any], reason: str
) -> Any:
    """`plain(**kwargs)` where a default method cannot be honoured; says once why.

    What the method took over is left out with it: transformers would begin its assisted generation for that, which
    refuses most of what the method refuses.
    """
    _say_plain(model, reason)
    for name in STARTING & request.config.transformers_arguments.keys():
        unset(model, kwargs, name)
    if as_head(kwargs.get("assistant_model")) is not None:  # transformers drafts with none
        del kwargs["assistant_model"]
    if kwargs.get("custom_generate") is decode:
        del kwargs["custom_generate"]
    return plain(**kwargs)


def _say_plain(model: PreTrainedModel, reason: str) -> None:
    state_of(model).warn_once(f"{type(model).__name__} decodes without its default spec_method: {reason}")


def _by_transformers(
    model: PreTrainedModel, plain: Callable[..., Any], request: Request, kwargs: dict[str, Any], reason: str
) -> Any:
    """transformers' assisted generation, with its arguments."""
    state_of(model).warn_once(f"{type(model).__name__}: {reason}")
    if request.tokenizers is not None:
        kwargs["assistant_tokenizer"] = request.tokenizers[1]
    output = plain(**kwargs, assistant_model=request.assistant_model)
    stats = SpecStats(method=request.name or "", tier="chain", plain_reason=reason)
    if not isinstance(output, torch.Tensor):
        stats.num_tokens = output.sequences.shape[1] - prompt_length(model, kwargs)
    return with_stats(output, stats)
