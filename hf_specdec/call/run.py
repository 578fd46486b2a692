"""Carries out one call: transformers' own `generate` prepares it, and its plan says what decodes it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.arguments import (
    check_spelling,
    named_arguments,
    own_arguments,
    plain_request,
    read_prompt_request,
    read_request,
)
from hf_specdec.call.assisted_arguments import ASSISTED_ARGUMENTS, check_none_asked, check_taken
from hf_specdec.call.custom_generate import CustomGenerate
from hf_specdec.call.drafting import drafting_of
from hf_specdec.call.facts import Facts
from hf_specdec.call.plain_kernels import plain_kernels
from hf_specdec.call.plan import NO_METHOD, plan_call, plan_request
from hf_specdec.call.prepare import assisted_arguments, decoding_arguments, place_models, plain_arguments
from hf_specdec.call.request import Request, Settings, prompt_length
from hf_specdec.call.rules.method import check_draft_given
from hf_specdec.call.rules.settings import check_prompt, check_settings
from hf_specdec.common.stats import CallPlan, SpecStats
from hf_specdec.compat.placement import device_mesh
from hf_specdec.distributed.rank_sync import digest, rank_sync_of
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.decode import decode_speculatively
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain import decode_assisted, decode_plain
from hf_specdec.engine.shared_processes import steps_of
from hf_specdec.errors import ConfigError
from hf_specdec.forward.forward_arguments import tensors_of

Generate = Callable[..., Any]


def generate_with(model: PreTrainedModel, inner: Generate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`inner(*args, **kwargs)` with a decoding method of this package, where the call asks for one."""
    inner, args, kwargs = _unwrapped(inner, args, kwargs)
    if isinstance(kwargs.get("custom_generate"), CustomGenerate):
        return inner(*args, **kwargs)
    arguments = named_arguments(inner, args, kwargs)
    if arguments.get("custom_generate") is decode:  # here transformers drops nothing on the way to it
        del arguments["custom_generate"]
        for name in ("streamer", "assistant_model"):
            if (value := arguments.pop(f"spec_{name}", None)) is not None:
                arguments[name] = value
    check_spelling(model, arguments)
    request = read_request(model, Settings.of(model, arguments))
    if request is None or (request.is_default and compat.is_assistants_call(arguments)):
        with plain_kernels(model):
            return inner(**arguments)
    plan = plan_request(Facts(model), request)
    if plan is not None:
        return _by_transformers(model, inner, request, plan)
    return _prepared(model, inner, request, decode_prepared)


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
    check_settings(Settings({}, generation_config, model.generation_config))
    check_prompt(model, input_ids, has_embeddings=kwargs.get("inputs_embeds") is not None, of_decoder=True)
    ours = {name: kwargs.pop(name) for name in (*own_arguments(), *ASSISTED_ARGUMENTS) if name in kwargs}
    ours |= {"assistant_model": spec_assistant_model, "streamer": spec_streamer}
    config = compat.without_defaults(generation_config, ASSISTED_ARGUMENTS)
    request = read_request(model, Settings(ours, config, model.generation_config))
    if request is None:
        check_none_asked(ours)
    else:
        check_taken(request.settings, request.method)
        _check_dropped(request, generation_config)
        place_models(model, request, has_begun=True)
    if spec_streamer is not None:
        spec_streamer.put(input_ids.cpu())
    custom = CustomGenerate(request, decode_prepared, spec_streamer)
    with custom.ending_streamer():
        return custom(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def _check_dropped(request: Request, config: GenerationConfig) -> None:
    """Refuse what transformers dropped on the way to `decode`, where that can be seen."""
    hint = "transformers drops assistant_model here; its name is spec_assistant_model. "
    check_draft_given(request, "spec_assistant_model", hint)
    if getattr(config, "stop_strings", None) is not None:
        remedy = "transformers drops the tokenizer: enable the model, or pass a StopStringCriteria."
        raise ConfigError("stop_strings", "must be unset with custom_generate", config.stop_strings, remedy)


def with_own_arguments(signature: inspect.Signature, *others: str) -> inspect.Signature:
    """The signature with our arguments, and `others`, in front of its `**kwargs`."""
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in own_arguments()]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None) for name in (*own_arguments(), *others)]
    return signature.replace(parameters=[*named, *added, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


# transformers hands a custom method only those arguments that its signature names.
decode.__signature__ = with_own_arguments(inspect.signature(decode), *ASSISTED_ARGUMENTS)  # type: ignore[attr-defined]


def decode_prepared(call: Call, request: Request | None, encoder_inputs: Any = None) -> Any:
    """Decode a prepared call as its plan says."""
    rank_sync = rank_sync_of(call.model)
    if request is None:
        with plain_kernels(call.model):
            return decode_plain(call, stats=SpecStats.of(NO_METHOD), rank_sync=rank_sync)
    if (fault := compat.virtual_tokens_fault(call.model)) is not None:
        state_of(call.model).warn_once(fault)
    facts = Facts(call.model, call)
    plan = plan_call(facts, request)
    if rank_sync is not None:
        rank_sync.check(lambda: digests(call, request, plan))
    log_notes(call.model, plan)
    stats = SpecStats.of(plan)
    if plan.loop == "transformers":
        with plain_kernels(call.model):
            return decode_plain(call, stats=stats, rank_sync=rank_sync)
    draft_runner, make_drafter = drafting_of(facts, request, plan, encoder_inputs)
    if plan.loop == "assisted":
        return decode_assisted(call, make_drafter(0, None), stats=stats, rank_sync=rank_sync)
    costs = facts.costs(request)
    budget = None if costs is None else Budget(costs, max_nodes=plan.budget, widths=plan.widths)
    steps = steps_of(rank_sync, stats, budget=budget, observer=request.observer)
    return decode_speculatively(call, plan, make_drafter, steps=steps, draft_runner=draft_runner)


def prepared_call(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> tuple[Call, Request]:
    """A call of an enabled model's `generate`, checked and prepared by transformers; nothing is computed yet.

    One without a method, or whose default cannot be honoured, drafts nothing.

    Raises:
        ConfigError: as when `generate` is called with these arguments.
    """
    inner, args, kwargs = _unwrapped(state_of(model).own_generate or class_generate(model), (), kwargs)
    request = read_prompt_request(model, named_arguments(inner, args, kwargs))
    if (plan := plan_request(Facts(model), request)) is not None and plan.way == "plain":
        log_notes(model, plan)
        request = plain_request(model, request)
    prepared: tuple[Call, Request] = _prepared(
        model, inner, request, lambda call, request, encoder_inputs: (call, request)
    )
    return prepared


def class_generate(model: PreTrainedModel) -> Generate:
    """`generate` of the model's own class, which decodes without this package."""
    generate: Generate = model.__class__.generate.__get__(model)
    return generate


def generate_once(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """`generate(**kwargs)` of an enabled model, for a model that is not enabled and stays so."""
    return generate_with(model, class_generate(model), (), kwargs)


def log_notes(model: PreTrainedModel, plan: CallPlan) -> None:
    """Log what the plan has to say of the model, once."""
    for note in plan.notes:
        state_of(model).warn_once(note)


def digests(call: Call, request: Request, plan: CallPlan, **more: Any) -> dict[str, int]:
    """A digest of everything in a call that decides which forwards are computed, by name."""
    config, draft = call.generation_config, request.assistant_model
    settings = {
        "spec_method": (request.name, request.budget, request.config.engine),
        "assistant_model": (type(draft).__name__, draft is not None and device_mesh(draft) is not None),
        "return_dict_in_generate": bool(config.return_dict_in_generate),
        "output_hidden_states": bool(config.output_hidden_states),
        "output_attentions": bool(config.output_attentions),
        "do_sample": bool(config.do_sample),
        "max_length": config.max_length,
        compat.CACHE: type(call.cache).__name__,
        "tier": plan.way,
        "reason": plan.plain_reason,
        **more,
    }
    tensors = {"input_ids": call.input_ids, **tensors_of(call.model_kwargs)}
    return {name: digest(value) for name, value in {**tensors, **settings}.items()}


def _prepared(
    model: PreTrainedModel, inner: Generate, request: Request, decode: Callable[[Call, Request | None, Any], Any]
) -> Any:
    """`inner` with the arguments of the request, and with `decode` for the call that transformers prepares."""
    place_models(model, request)
    arguments = decoding_arguments(model, request)
    arguments["custom_generate"] = custom = CustomGenerate(request, decode, arguments.get("streamer"))
    with custom.ending_streamer(), custom.reading_encoder(model, arguments):
        return custom.within(model, inner, arguments)


def _by_transformers(model: PreTrainedModel, inner: Generate, request: Request, plan: CallPlan) -> Any:
    """The call as transformers' own `generate` decodes it."""
    log_notes(model, plan)
    if plan.way == "plain":
        with plain_kernels(model):
            output = inner(**plain_arguments(request))
    else:
        place_models(model, request)
        output = inner(**assisted_arguments(model, request))
    if isinstance(output, torch.Tensor) or not hasattr(output, "sequences"):
        return output
    stats = SpecStats.of(plan)
    stats.num_tokens = output.sequences.shape[1] - prompt_length(model, request.settings.arguments)
    return with_stats(output, stats)


def _unwrapped(
    inner: Generate, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Generate, tuple[Any, ...], dict[str, Any]]:
    """The call without `functools.partial` around it, so that what that sets is checked too."""
    while isinstance(inner, functools.partial):
        partial: functools.partial[Any] = inner
        inner, args, kwargs = partial.func, (*partial.args, *args), {**partial.keywords, **kwargs}
    return inner, args, dict(kwargs)
