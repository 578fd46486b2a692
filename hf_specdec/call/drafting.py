"""Drafters of a planned call, and the network that drafts with them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.common.stats import CallPlan
from hf_specdec.engine.draft_pairing import draft_runner_of, logits_processor_of
from hf_specdec.engine.head_pairing import head_runner_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.forward.networks.exit_runner import ExitRunner
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext
from hf_specdec.methods.common.translation import Translation


def drafting_of(
    facts: Facts, request: Request, plan: CallPlan, encoder_inputs: Any = None
) -> tuple[BaseDraftRunner | None, Callable[[int, torch.Generator | None], BaseDrafter]]:
    """The network that drafts in a call, if one does, and what makes the drafter of a row.

    Returns:
        The runner, and a function of the row's number and of its random generator.
    """
    call, state = facts.call, state_of(facts.model)
    logits_processor = logits_processor_of(call)
    draft_runner, translations = _network_runner(facts, request, plan, encoder_inputs)
    is_fixed = torch.are_deterministic_algorithms_enabled()
    costs = state.step_costs(facts.model, facts.device, is_fixed=is_fixed, is_static=facts.has_static_cache)
    token_cost = functools.partial(costs.token_cost, dtype=facts.model.dtype)
    jump = functools.partial(costs.jump, dtype=facts.model.dtype)

    def make_drafter(row: int, generator: torch.Generator | None) -> BaseDrafter:
        return request.make_drafter(
            DrafterContext(
                state.method_state,
                scorer=None if draft_runner is None else draft_runner.row(row),
                logits_processor=logits_processor,
                generator=generator,
                is_sampled=bool(call.generation_config.do_sample),
                takes_trees=plan.way == "tree",
                token_cost=token_cost,
                jump=jump,
                translation=None if translations is None else translations[row],
            )
        )

    return draft_runner, make_drafter


def _network_runner(
    facts: Facts, request: Request, plan: CallPlan, encoder_inputs: Any
) -> tuple[BaseDraftRunner | None, list[Translation] | None]:
    """The runner of the call's draft network, and each row's text in its vocabulary where that is another one."""
    call = facts.call
    if (layers := request.config.drafting_layers) is not None:
        return ExitRunner(
            call.model,
            layers,
            num_rows=len(call.input_ids),
            takes_trees=plan.way == "tree",
            device=call.input_ids.device,
            facts=call.facts,
        ), None
    network = facts.network(request)
    if network is None or not facts.drafts_with_network(request):
        return None, None
    if isinstance(network, DraftHead):
        return head_runner_of(call, network, budget=request.budget, compiles=plan.is_head_compiled), None
    tier, structure = facts.draft(request)
    translations = facts.translations(request)
    runner = draft_runner_of(
        call,
        network,
        tier=tier,
        budget=request.budget,
        facts=structure,
        encoder_inputs=encoder_inputs,
        translations=translations,
    )
    return runner, translations
