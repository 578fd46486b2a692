"""Carries out one call: transformers' own `generate` prepares it, and its plan says what decodes it."""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria

from hf_specdec.call.arguments import (
    ASSISTED_ARGUMENTS,
    added_arguments,
    named_arguments,
    plain_request,
    read_prompt_request,
    read_request,
)
from hf_specdec.call.checks import (
    LENGTHS,
    check_draft,
    check_prompt,
    check_settings,
    check_taken,
)
from hf_specdec.call.custom_generate import CustomGenerate, plain_kernels
from hf_specdec.call.plan import PLAIN_PLAN, drafting_of, plan_call, plan_request
from hf_specdec.call.request import NO_METHOD, Request, prompt_length
from hf_specdec.common.stats import CallPlan, SpecStats
from hf_specdec.compat.caches import CACHE, STATIC_NAMES
from hf_specdec.compat.devices import device_mesh, input_device
from hf_specdec.compat.generation import is_assistants_call, merged_criteria
from hf_specdec.distributed.placement import is_placed, move, move_pair, read_devices
from hf_specdec.distributed.rank_sync import digest, rank_sync_of
from hf_specdec.engine.call import with_stats
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.decode import decode_speculatively
from hf_specdec.engine.head_pairing import place_head
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain import decode_assisted, decode_plain
from hf_specdec.engine.shared_processes import steps_of
from hf_specdec.errors import ConfigError
from hf_specdec.forward.inputs import tensors_of
from hf_specdec.methods.common.draft_head import DraftHead

Generate = Callable[..., Any]


def generate_with(model: PreTrainedModel, inner: Generate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`inner(*args, **kwargs)` with a decoding method of this package, where the call asks for one."""
    if isinstance(kwargs.get("custom_generate"), CustomGenerate):
        return inner(*args, **kwargs)
    arguments = named_arguments(inner, args, kwargs)
    if arguments.get("custom_generate") is decode:  # here transformers drops nothing on the way to it
        del arguments["custom_generate"]
        for name in ("streamer", "assistant_model"):
            if (value := arguments.pop(f"spec_{name}", None)) is not None:
                arguments[name] = value
    request = read_request(Request.of(model, arguments))
    if request.method is NO_METHOD or (request.is_default and is_assistants_call(arguments)):
        with plain_kernels(model):
            return inner(**arguments)
    plan = plan_request(request)
    if plan is not None:
        return _plainly(inner, request, plan)
    return _prepared(inner, request, decode_prepared)


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
    enable the model for `stop_strings` or a draft with a tokenizer of its own.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: from transformers.
        spec_streamer (*optional*): a transformers streamer; it gets the prompt first, as from `generate`.
        spec_assistant_model (`PreTrainedModel`, *optional*): a draft model or head, for the methods that take one.
        kwargs: `spec_method`, `spec_config` and the other arguments of an enabled `generate`; and transformers' own.
    """
    check_settings(Request(model, {}, generation_config))
    check_prompt(model, input_ids, has_embeddings=kwargs.get("inputs_embeds") is not None, of_decoder=True)
    arguments = {name: kwargs.pop(name) for name in (*added_arguments(), *ASSISTED_ARGUMENTS) if name in kwargs}
    arguments |= {"assistant_model": spec_assistant_model, "streamer": spec_streamer}
    request = read_request(Request(model, arguments, generation_config))
    if request.method is not NO_METHOD:
        check_taken(request)
        _check_dropped(request, generation_config)
        _place_models(request, has_begun=True)
    if spec_streamer is not None:
        spec_streamer.put(input_ids.cpu())
    custom = CustomGenerate(request, decode_prepared, spec_streamer)
    return custom(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def _check_dropped(request: Request, config: GenerationConfig) -> None:
    """Refuse what transformers dropped on the way to `decode`, where that can be seen."""
    hint = "transformers drops assistant_model here; its name is spec_assistant_model. "
    check_draft(request, "spec_assistant_model", hint)
    if getattr(config, "stop_strings", None) is not None:
        remedy = "transformers drops the tokenizer: enable the model, or pass a StopStringCriteria."
        raise ConfigError("stop_strings", "must be unset with custom_generate", config.stop_strings, remedy)


def with_added_arguments(signature: inspect.Signature, *others: str) -> inspect.Signature:
    """The signature with our arguments, and `others`, in front of its `**kwargs`."""
    added, kinds = added_arguments(), inspect.Parameter
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in added]
    keywords = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in (*added, *others)]
    return signature.replace(parameters=[*named, *keywords, kinds("kwargs", kinds.VAR_KEYWORD)])


# transformers hands a custom method only those arguments that its signature names.
decode.__signature__ = with_added_arguments(inspect.signature(decode), *ASSISTED_ARGUMENTS)  # type: ignore[attr-defined]


def decode_prepared(request: Request) -> Any:
    """Decode a prepared call as its plan says."""
    model, call = request.model, request.call
    rank_sync = rank_sync_of(model)
    if request.method is NO_METHOD:
        plan = PLAIN_PLAN
    else:
        plan = plan_call(request)
        if rank_sync is not None:
            rank_sync.check(digests(request, plan))
        log_notes(model, plan)
    stats = SpecStats.of(plan)
    if plan.loop == "transformers":
        with plain_kernels(model):
            return decode_plain(call, stats=stats, rank_sync=rank_sync)
    draft_runner, make_drafter = drafting_of(request, plan)
    if plan.loop == "assisted":
        return decode_assisted(call, make_drafter(0, None), stats=stats)
    costs = request.costs
    budget = None if costs is None else Budget(costs, max_nodes=plan.budget, widths=plan.widths)
    steps = steps_of(rank_sync, stats, budget=budget, observer=request.observer)
    return decode_speculatively(call, plan, make_drafter, steps=steps, draft_runner=draft_runner)


def prepared_request(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> Request:
    """A call of an enabled model's `generate`, checked and prepared by transformers; nothing is computed yet.

    One without a method, or whose default cannot be honoured, drafts nothing.

    Raises:
        ConfigError: as when `generate` is called with these arguments.
    """
    inner = class_generate(model)
    request = read_prompt_request(model, named_arguments(inner, (), kwargs))
    if (plan := plan_request(request)) is not None:
        log_notes(model, plan)
        request = plain_request(request)
    prepared: Request = _prepared(inner, request, lambda request: request)
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


def digests(request: Request, plan: CallPlan) -> dict[str, int]:
    """A digest of everything in a call that decides which forwards are computed, by name."""
    call, draft = request.call, request.assistant_model
    names = ("return_dict_in_generate", "output_hidden_states", "output_attentions", "do_sample", "max_length")
    settings = {name: getattr(call.generation_config, name) for name in names} | {
        "spec_method": (request.method.name, request.budget, request.config.engine),
        "assistant_model": (type(draft).__name__, draft is not None and device_mesh(draft) is not None),
        CACHE: type(call.cache).__name__,
        "plan": (plan.way, plan.plain_reason),
    }
    tensors = {"input_ids": call.input_ids, **tensors_of(call.model_kwargs)}
    return {name: digest(value) for name, value in {**tensors, **settings}.items()}


def _prepared(inner: Generate, request: Request, decode: Callable[[Request], Any]) -> Any:
    """`inner` with the arguments of the request, and with `decode` for the call that transformers prepares."""
    _place_models(request)
    arguments = _decoding_arguments(request)
    arguments["custom_generate"] = custom = CustomGenerate(request, decode, arguments.get("streamer"))
    return custom.within(inner, arguments)


def _plainly(inner: Generate, request: Request, plan: CallPlan) -> Any:
    """The call as transformers' own `generate` decodes it."""
    log_notes(request.model, plan)
    with plain_kernels(request.model):
        arguments = dict(request.arguments)
        if isinstance(arguments.get("assistant_model"), DraftHead):  # transformers drafts with none
            del arguments["assistant_model"]
        output = inner(**arguments)
    if isinstance(output, torch.Tensor) or not hasattr(output, "sequences"):
        return output
    stats = SpecStats.of(plan)
    stats.num_tokens = output.sequences.shape[1] - prompt_length(request.model, request.arguments)
    return with_stats(output, stats)


def _decoding_arguments(request: Request) -> dict[str, Any]:
    """Arguments of `generate` for a decoding method of this package, to which it hands the prepared call."""
    left_out, criteria = list[str](), {}
    # transformers loses the tokenizer on the way to a decoding method.
    if (stop_strings := request.setting("stop_strings")) is not None:
        if (tokenizer := request.arguments.get("tokenizer")) is None:
            remedy = "Pass tokenizer=... as for plain generation."
            raise ConfigError("tokenizer", "must be given with stop_strings", None, remedy)
        criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
        others = request.arguments.get("stopping_criteria") or []
        criteria = {"stopping_criteria": merged_criteria(request.model, criterion, others)}
        left_out.append("stop_strings")
    values = _replaced_values(request)
    # transformers' static layers do not take values of autocast's dtype.
    if "use_cache" in values and torch.is_autocast_enabled(input_device(request.model).type):
        left_out.append("cache_implementation")
        values.pop("cache_implementation", None)
    arguments = request.without(*left_out) | criteria | values
    arguments.pop("tokenizer", None)
    return arguments


def _replaced_values(request: Request) -> dict[str, Any]:
    """Values that take the place of the caller's: where the call moves the target, tensors on its new device."""
    arguments = request.arguments
    values: dict[str, Any] = {}
    if "target" in request.config.device_lists:
        device = input_device(request.model)
        values = {name: v.to(device) for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    # Integers of Python: NumPy's and tensors have no `bit_length`, which buffers ask for.
    for name in LENGTHS:
        if (value := arguments.get(name)) is not None:
            if not hasattr(value, "__index__"):
                raise ConfigError(name, "must be an integer", value, f"Pass an int, as in {name}=20.")
            values[name] = operator.index(value)
    if request.setting("cache_implementation") in STATIC_NAMES:
        values["cache_implementation"] = "static"
    if request.setting("use_cache") is False and request.is_models_default("use_cache"):  # as MPT's checkpoints say
        values["use_cache"] = True
    return values


def _place_models(request: Request, *, has_begun: bool = False) -> None:
    """Put the models where the configuration's device lists say; once a call has begun the target stays."""
    model, draft, lists = request.model, request.assistant_model, request.config.device_lists
    target_devices, field = lists.get("target"), request.config.device_fields.get("target", "")
    if target_devices is not None and has_begun and not is_placed(model, read_devices(target_devices, field)):
        remedy = "Enable the model, so that generate moves it, or move it first."
        raise ConfigError(field, "must name where the target is with custom_generate", target_devices, remedy)
    if draft is not None and not isinstance(draft, DraftHead):
        move_pair(model, draft, target_devices=target_devices, draft_devices=lists.get("draft"))
        return
    if draft is not None:
        place_head(draft, model, request.config)
    if target_devices is not None:
        move(model, target_devices, field)
