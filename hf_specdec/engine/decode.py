"""One prepared call, decoded in the best way that its model and its inputs allow."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat.attention import takes_tensor_masks
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.compat.placement import device_mesh
from hf_specdec.distributed.rank_sync import digest, rank_sync_of
from hf_specdec.engine.call import Call
from hf_specdec.engine.cost.cost_facts import other_threads
from hf_specdec.engine.cost.cost_model import StepCosts
from hf_specdec.engine.draft_pairing import draft_capability, draft_runner_of, logits_processor_of, translations_of
from hf_specdec.engine.exit_pairing import exit_runner_of
from hf_specdec.engine.head_pairing import head_runner_of, own_head_of
from hf_specdec.engine.length_rules import scales_by_columns, step_columns
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain import decode_assisted, decode_plain
from hf_specdec.engine.plain_reasons import check_tier, encoder_kwargs, plain_reason
from hf_specdec.engine.speculative import decode_speculatively
from hf_specdec.engine.static_shapes import check_cache, has_static_cache
from hf_specdec.forward.capabilities.findings import Found
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.forward.target.inputs import tensors_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext
from hf_specdec.methods.common.translation import Translation
from hf_specdec.request.request import Request


def decode_call(call: Call, request: Request | None, encoder_inputs: Any = None) -> Any:
    """Decode a prepared call in the best way that the model and the inputs allow."""
    model, rank_sync = call.model, rank_sync_of(call.model)
    stats = SpecStats(method=(request.name or "") if request is not None else "plain")
    if request is None:
        return decode_plain(call, stats=stats, rank_sync=rank_sync)
    if (fault := compat.virtual_tokens_fault(model)) is not None:
        state_of(model).warn_once(fault)
    found = _as_chain(call, request, found_for(call))
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
        costs=costs_of(call.model, request, call.input_ids.device, is_static=has_static_cache(call)),
        observer=request.observer,
        rank_sync=rank_sync,
    )


def found_for(call: Call) -> Found:
    """What is known of the call's model as it is now."""
    return state_of(call.model).findings.of(call.model, encoder_kwargs(call), now=call.now)


def _as_chain(call: Call, request: Request, found: Found) -> Found:
    """What is known, without trees where attention goes by the columns of the cache."""
    needs_tree = request.method is not None and request.method.needs_tree
    is_tree = found.capability.tier == "tree" and not needs_tree and len(call.input_ids) == 1
    if not is_tree or not scales_by_columns(call, step_columns(request, "tree")):
        return found
    return found.as_chain("its attention goes by the columns of the cache, of which a tree has more than its text")


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
) -> tuple[BaseDraftRunner | None, Callable[[int, torch.Generator | None], BaseDrafter]]:
    """What drafts with a network in this call, if anything does, and what makes the drafter of a row.

    Returns:
        The runner, and a function of the row's number and of its random generator.
    """
    logits_processor, state = logits_processor_of(call), state_of(call.model)
    draft_runner, translations = _draft_runner(call, request, found, encoder_inputs)
    takes_trees = found.capability.tier == "tree"
    is_sampled = bool(call.generation_config.do_sample)
    is_fixed = torch.are_deterministic_algorithms_enabled()
    costs = state.step_costs(call.model, call.input_ids.device, is_fixed=is_fixed, is_static=has_static_cache(call))
    token_cost = functools.partial(costs.token_cost, dtype=call.model.dtype)
    jump = functools.partial(costs.jump, dtype=call.model.dtype)

    def make_drafter(row: int, generator: torch.Generator | None) -> BaseDrafter:
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


def costs_of(
    model: PreTrainedModel, request: Request, device: torch.device, *, is_static: bool = False
) -> StepCosts | None:
    """What the model's forwards cost on `device`, where the method drafts as many tokens as save time.

    Args:
        is_static: whether they go over a static cache.
    """
    if not request.config.fits_costs:
        return None
    path = request.config.costs_file
    state = state_of(model)
    costs = state.step_costs(model, device, path, is_fixed=request.config.is_deterministic, is_static=is_static)
    warning = other_threads(costs.facts, device)
    if warning is not None:
        state.warn_once(f"{type(model).__name__}: {warning}")
    return costs
