"""One prepared call, decoded in the best way that its model and its inputs allow.

The one place that says why a call is decoded plainly, by transformers, or apart from the prompts beside it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.capabilities.findings import Found
from hf_specdec.capabilities.probe import Capability
from hf_specdec.compat.attention import takes_tensor_masks
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.compat.placement import device_mesh
from hf_specdec.distributed.rank_sync import digest, rank_sync_of
from hf_specdec.engine.batch_rules import assisted_fallback_reason, batch_fallback_reason, padding_fallback_reason
from hf_specdec.engine.call import Call
from hf_specdec.engine.cost_facts import other_threads
from hf_specdec.engine.cost_model import StepCosts
from hf_specdec.engine.draft_pairing import draft_capability, draft_runner_of, logits_processor_of, translations_of
from hf_specdec.engine.exit_pairing import check_exit, exit_runner_of
from hf_specdec.engine.first_call import first_call_of
from hf_specdec.engine.head_pairing import head_runner_of, own_head_of
from hf_specdec.engine.length_rules import exceeds_original_length, reason_against_length
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain import decode_assisted, decode_plain
from hf_specdec.engine.speculative import decode_speculatively
from hf_specdec.engine.static_shapes import check_cache, reason_against_static
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.inputs import rows_of, tensors_of
from hf_specdec.forward.runner_base import BaseDraftRunner
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.draft_head import DraftHead
from hf_specdec.methods.method import DrafterContext
from hf_specdec.methods.registry import METHODS
from hf_specdec.methods.translation import Translation
from hf_specdec.request import Request
from hf_specdec.stats import SpecStats

__all__ = [
    "alone_reason",
    "check_tier",
    "costs_of",
    "decode_call",
    "drafting",
    "fields_of",
    "found_for",
    "one_by_one_reason",
    "plain_reason",
    "transformers_reason",
]

SEQUENCE_TENSORS = ("attention_mask", "position_ids")  # of a prompt alone, all ones and a count


def decode_call(call: Call, request: Request | None, encoder_inputs: Any = None) -> Any:
    """Decode a prepared call in the best way that the model and the inputs allow."""
    model, rank_sync = call.model, rank_sync_of(call.model)
    stats = SpecStats(method=(request.name or "") if request is not None else "plain")
    if request is None:
        return decode_plain(call, stats=stats, rank_sync=rank_sync)
    first_call = first_call_of(call, request, stats)
    found = first_call.found if first_call is not None else found_for(call)
    tier = stats.tier = found.capability.tier
    stats.plain_reason = plain_reason(call, request, found)
    rank_sync.check(lambda: fields_of(call, request, tier=tier, reason=stats.plain_reason))
    if stats.plain_reason is not None:
        stats.tier = "plain"
        state_of(model).warn_once(f"{type(model).__name__} decodes without speculation: {stats.plain_reason}")
        return decode_plain(call, stats=stats, rank_sync=rank_sync)
    check_tier(model, request, found.capability)
    if request.config.engine == "loop":
        check_cache(call)
    if tier == "chain" and not takes_tensor_masks(found.capability.attention):
        state_of(model).warn_once(f"{type(model).__name__} verifies chains only: {found.capability.reason}")
    draft_runner, make_drafter = drafting(call, request, found, encoder_inputs)
    if request.config.engine == "assisted":
        drafter = make_drafter(0, None)
        stats.method = stats.method or type(drafter).__name__
        return decode_assisted(call, drafter, stats=stats, rank_sync=rank_sync)
    return decode_speculatively(
        call,
        make_drafter,
        tier=tier,
        budget=request.budget,
        stats=stats,
        draft_runner=draft_runner,
        costs=costs_of(call.model, request, call.input_ids.device),
        observer=request.observer,
        rank_sync=rank_sync,
        decide=None if first_call is None else first_call.decide,
    )


def found_for(call: Call) -> Found:
    """What is known of the call's model as it is now."""
    return state_of(call.model).findings.of(call.model, _encoder_kwargs(call), now=call.now)


def plain_reason(call: Call, request: Request, found: Found) -> str | None:
    """Why a call decodes without speculation, if it does."""
    if compat.places_adapters(call.model):
        return (
            "PEFT's aLoRA counts tokens from a forward's end; a LoRA adapter without alora_invocation_tokens does not"
        )
    if found.capability.tier == "plain":
        return found.capability.reason
    if (reason := _reason_against_cache(call)) is not None:
        return reason
    if call.generation_config.output_attentions and call.generation_config.return_dict_in_generate:
        return "the model's own generate asks for attention, which over a tree is not the text's"
    mask = call.model_kwargs.get("decoder_attention_mask")
    if found.capability.tier == "chain" and mask is not None and not bool(mask.all()):
        return "its decoder_attention_mask hides tokens, which forwards of one token may see and those of several not"
    if (reason := reason_against_static(call, found.capability.tier, request.config.engine)) is not None:
        return reason
    if request.is_default and (reason := _reason_against_default(call, request, found)) is not None:
        return reason
    if (reason := reason_against_length(call, found.capability.tier, request.config.engine)) is not None:
        return reason
    if request.config.engine == "assisted":
        if len(call.input_ids) > 1:
            return "transformers' assisted decoding takes one sequence"
        if compat.has_virtual_tokens(call.model):
            return "transformers' assisted decoding prepares no virtual tokens of PEFT's"
        if compat.is_recurrent(call.model):
            return "transformers' assisted decoding leaves rejected tokens in a recurrent state"
        if call.reads_embeddings and request.is_default:
            return "transformers' assisted decoding reads no inputs_embeds"
        if not compat.fresh_cache(call.model):
            return "transformers' assisted decoding takes no cache that the model makes itself"
        if compat.cached_length(call.model_kwargs.get(compat.cache_name(call.model_kwargs))):
            return "transformers' assisted decoding reads a text from its start, over the part that is cached"
        return assisted_fallback_reason(call.logits_processor)
    if len(call.input_ids) == 1:
        return padding_fallback_reason(call, found)
    mask = call.model_kwargs.get("attention_mask")
    has_own_cache = call.facts.of(compat.has_own_cache, call.model)
    if mask is not None and not call.model.config.is_encoder_decoder and has_own_cache:
        return "padding meets cache layers of the model's own, which a few tokens cannot try out"
    return batch_fallback_reason(call) or found.batch_fallback_reason(call.model, _encoder_kwargs(call))


def _reason_against_cache(call: Call) -> str | None:
    """Why a call's cache holds something else than its text once, or `None`."""
    kwargs = call.model_kwargs
    if kwargs.get("use_cache", True) is None:
        return "with use_cache=None transformers caches the whole text again with each token"
    cache = kwargs.get(compat.cache_name(kwargs))
    is_shared = isinstance(cache, compat.Cache) and not isinstance(cache, compat.EncoderDecoderCache)
    if call.model.config.is_encoder_decoder and is_shared:
        return f"its self- and cross-attention share the {type(cache).__name__} that was passed"
    return None


def one_by_one_reason(given: Any, request: Request, found: Found) -> str | None:
    """Why prompts of different lengths are decoded one by one, if they are.

    Args:
        given: the model, perhaps in a wrapper.
    """
    if compat.adds_virtual_tokens(given):
        return "PEFT's wrapper puts virtual tokens before each prompt"
    if compat.finds_invocations(given):
        return "PEFT's wrapper looks in each prompt for its adapter's alora_invocation_tokens"
    model = compat.generation_model(given)
    if (reason := _assisted_reason(request)) is not None:
        return reason
    if model.config.is_encoder_decoder:
        return "its decoder reads an encoding of each prompt"
    if compat.has_own_input_preparation(model):
        return "its class prepares the inputs of each forward itself"
    if found.capability.tier != "tree":
        return found.capability.reason
    return found.batch_fallback_reason(model)


def alone_reason(call: Call, request: Request) -> str | None:
    """Why one prompt among others is decoded by itself, if it is.

    In a shared batch a forward takes nothing of a sequence but ids and positions, counted from 0; the cache changes its
    shape, and nobody looks at it afterwards.
    """
    if (reason := _assisted_reason(request)) is not None:
        return reason
    if (reason := _reason_against_cache(call)) is not None:
        return reason
    kwargs = call.model_kwargs
    cache = kwargs.get(compat.cache_name(kwargs))
    if isinstance(cache, compat.StaticCache) or compat.is_users_own(cache):
        return f"it has a {type(cache).__name__} of its own"
    if exceeds_original_length(call):
        return "its rotary frequencies follow the length of its text"
    others = [name for name in tensors_of(kwargs) if name not in SEQUENCE_TENSORS]
    if others:
        return f"its forward takes {others[0].partition('.')[0]}"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return "its attention_mask hides tokens"
    counted = torch.arange(call.input_ids.shape[1], device=call.input_ids.device)
    if positions is not None and (positions.shape[-1] != len(counted) or not bool((positions == counted).all())):
        return "its position_ids do not count from 0"
    return None


def transformers_reason(request: Request) -> str | None:
    """Why a draft model is left to transformers' own assisted decoding, if it is."""
    if request.assistant_model is None:
        return None
    return "transformers' own assisted decoding was asked for" if request.config.engine == "assisted" else None


def _assisted_reason(request: Request) -> str | None:
    """Why transformers' assisted decoding takes one prompt after the other, if it was asked for."""
    if request.config.engine != "assisted":
        return None
    return transformers_reason(request) or "transformers' assisted decoding takes one sequence"


def fields_of(call: Call, request: Request, **found: Any) -> dict[str, int]:
    """A digest of everything in a call that decides which forwards are computed, by name."""
    config, kwargs = call.generation_config, call.model_kwargs
    draft = request.assistant_model
    settings = {
        "spec_method": (request.name, request.budget, request.config.engine),
        "assistant_model": (type(draft).__name__, draft is not None and device_mesh(draft) is not None),
        "return_dict_in_generate": bool(config.return_dict_in_generate),
        "output_hidden_states": bool(config.output_hidden_states),
        "do_sample": bool(config.do_sample),
        "max_length": config.max_length,
        compat.CACHE: type(kwargs.get(compat.cache_name(kwargs))).__name__,
        **found,
    }
    tensors = {"input_ids": call.input_ids, **tensors_of(kwargs)}
    return {name: digest(value) for name, value in {**tensors, **settings}.items()}


def drafting(
    call: Call, request: Request, found: Found, encoder_inputs: Any = None
) -> tuple[BaseDraftRunner | None, Callable[[int, torch.Generator | None], Drafter]]:
    """What drafts with a network in this call, if anything does, and what makes the drafter of a row.

    Returns:
        The runner, and a function of the row's number and of its random generator.
    """
    logits_processor, state = logits_processor_of(call), state_of(call.model)
    draft_runner, translations = _draft_runner(call, request, found, encoder_inputs)
    takes_trees = found.capability.tier == "tree"
    is_sampled = bool(call.generation_config.do_sample)
    is_fixed = torch.are_deterministic_algorithms_enabled()
    costs = state.step_costs(call.model, call.input_ids.device, is_fixed=is_fixed)
    token_cost = functools.partial(costs.token_cost, dtype=call.model.dtype)
    jump = functools.partial(costs.jump, dtype=call.model.dtype)

    def make_drafter(row: int, generator: torch.Generator | None) -> Drafter:
        scorer = None if draft_runner is None else draft_runner.row(row)
        return request.make_drafter(
            DrafterContext(
                state.method_state,
                scorer=scorer,
                logits_processor=logits_processor,
                generator=generator,
                is_sampled=is_sampled,
                takes_trees=takes_trees,
                token_cost=token_cost,
                jump=jump,
                translation=None if translations is None else translations[row],
            )
        )

    return draft_runner, make_drafter


def _draft_runner(
    call: Call, request: Request, found: Found, encoder_inputs: Any
) -> tuple[BaseDraftRunner | None, list[Translation] | None]:
    """What drafts with a network in this call, and each row's text in its vocabulary where that is another one."""
    if (layers := request.config.drafting_layers) is not None:
        return exit_runner_of(call, layers, found), None
    assistant = request.assistant_model
    if assistant is None:
        assistant = own_head_of(call.model, request.method, request.config)
    if assistant is None:
        return None, None
    if isinstance(assistant, DraftHead):
        return head_runner_of(call, assistant, budget=request.budget), None
    now, translates = fingerprint(assistant), request.tokenizers is not None
    tier = draft_capability(call.model, assistant, translates=translates, now=now).tier
    translations = None if request.tokenizers is None else translations_of(call, *request.tokenizers)
    runner = draft_runner_of(
        call,
        assistant,
        tier=tier,
        budget=request.budget,
        facts=state_of(assistant).facts_of(now),
        encoder_inputs=encoder_inputs,
        translations=translations,
    )
    return runner, translations


def costs_of(model: PreTrainedModel, request: Request, device: torch.device) -> StepCosts | None:
    """What the model's forwards cost on `device`, where the method drafts as many tokens as save time."""
    if not request.config.fits_costs:
        return None
    path = request.config.costs_file
    state = state_of(model)
    costs = state.step_costs(model, device, path, is_fixed=request.config.is_deterministic)
    warning = other_threads(costs.facts, device)
    if warning is not None:
        state.warn_once(f"{type(model).__name__}: {warning}")
    return costs


def _reason_against_default(call: Call, request: Request, found: Found) -> str | None:
    """Why a method that was not asked for in the call itself cannot be honoured, or `None`."""
    layers = request.config.drafting_layers
    try:
        if layers is not None:
            check_exit(call, layers)
        check_tier(call.model, request, found.capability)
        check_cache(call)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return None


def check_tier(model: PreTrainedModel, request: Request, found: Capability) -> None:
    """Refuse a method that is of no use on a model that verifies chains only."""
    if found.tier == "tree" or request.method is None or not request.method.needs_tree:
        return
    others = ", ".join(repr(name) for name, method in METHODS.items() if not method.needs_tree and name != "plain")
    raise UnsupportedModelError(
        f"spec_method={request.name!r} needs a model that verifies trees; {type(model).__name__} takes chains only: "
        f"{found.reason}. Methods that work with it: {others}."
    )


def _encoder_kwargs(call: Call) -> dict[str, Any] | None:
    """What the probe needs to try a decoder: this call's own encoded input, of its first row."""
    names = ("encoder_outputs", "attention_mask")
    found = {name: call.model_kwargs[name] for name in names if call.model_kwargs.get(name) is not None}
    return rows_of(found, [0], len(call.input_ids)) if "encoder_outputs" in found else None
