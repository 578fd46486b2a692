"""Makes the plan of a call from its request: one way of decoding, with the reason, and the drafters of that way."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import DynamicCache

from hf_specdec.call.checks import CHECKS, REQUEST_CHECKS
from hf_specdec.call.request import Request
from hf_specdec.call.rules import CALL_RULES, CHECKED_RULES, MODEL_RULES, Rule
from hf_specdec.common.stats import CallPlan
from hf_specdec.compat.attention import takes_tensor_masks
from hf_specdec.engine.draft_pairing import draft_runner_of, logits_processor_of
from hf_specdec.engine.head_pairing import head_runner_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.static_shapes import (
    compile_settings,
    reason_against_compiling,
    reason_against_head,
    shapes_of,
)
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext

PLAIN_PLAN = CallPlan(way="plain", reason="no spec_method is given", method="plain", loop="transformers")


def plan_request(request: Request) -> CallPlan | None:
    """Plan of a call whose default method cannot be honoured; `None` where the prepared call decides.

    Raises:
        ConfigError: an argument of the call does not go with its method.
    """
    try:
        for check in REQUEST_CHECKS:
            check(request)
    except ConfigError as error:
        if not request.is_default:
            raise
        notes = (f"{request.model_name} decodes without its default spec_method: {error}",)
        return CallPlan(way="plain", reason=str(error), method=request.method.name, loop="transformers", notes=notes)
    return None


def plan_call(request: Request) -> CallPlan:
    """Plan of a prepared call.

    Raises:
        ConfigError, UnsupportedModelError: the call asks for a method that its model or inputs cannot serve.
    """
    if (reason := _first_reason(MODEL_RULES, request)) is None:
        reason = _first_reason(CALL_RULES, request) or _refusal(request) or _first_reason(CHECKED_RULES, request)
    inputs: dict[str, Any] = {"num_rows": request.num_rows, "cache": _cache(request)}
    if reason is not None:
        return _plain(request, reason, **inputs)
    return _speculative(request, **inputs, **_shapes(request))


def plan_row(request: Request) -> CallPlan:
    """Plan of a prepared prompt that shares a batch, unless a rule decodes it plainly.

    Raises:
        ConfigError, UnsupportedModelError: as of `plan_call`.
    """
    for check in CHECKS:
        check(request)
    if (reason := _first_reason(CHECKED_RULES, request)) is not None:
        return _plain(request, reason)
    return _speculative(request, shares_batch=True)


def plan_model(request: Request) -> CallPlan:
    """Plan of a call with one prompt, as far as its model decides it: nothing is prepared."""
    reason = _first_reason(MODEL_RULES, request)
    return _speculative(request) if reason is None else _plain(request, reason)


def _first_reason(rules: Iterable[Rule], request: Request) -> str | None:
    return next((reason for rule in rules if (reason := rule(request)) is not None), None)


def _refusal(request: Request) -> str | None:
    """Runs the checks: a refusal of a method by default is returned, that of any other raised."""
    try:
        for check in CHECKS:
            check(request)
    except (ConfigError, UnsupportedModelError) as error:
        if not request.is_default:
            raise
        return str(error)
    return None


def _plain(request: Request, reason: str, **inputs: Any) -> CallPlan:
    notes = (f"{request.model_name} decodes without speculation: {reason}",)
    return CallPlan(way="plain", reason=reason, method=request.method.name, loop="transformers", notes=notes, **inputs)


def _speculative(request: Request, *, notes: tuple[str, ...] = (), **more: Any) -> CallPlan:
    if request.tier == "chain" and not takes_tensor_masks(request.probed.capability.attention):
        notes += (f"{request.model_name} verifies chains only: {request.probed.capability.reason}",)
    return CallPlan(
        way=request.tier,
        reason=request.probed.capability.reason,
        method=request.method.name,
        loop="assisted" if request.is_assisted else "spec",
        network=_network(request),
        budget=request.budget,
        budget_reason=_budget_reason(request),
        rounding_reason=_rounding_reason(request, is_compiled=more.get("is_compiled", False)),
        notes=notes,
        **more,
    )


def _rounding_reason(request: Request, *, is_compiled: bool) -> str | None:
    if request.is_assisted:
        return "transformers' loop computes by torch's kernels, which are chosen by the number of tokens"
    if is_compiled:
        return "a compiled forward has kernels for each number of tokens"
    return request.probed.rounding_reason(request.model)


def _cache(request: Request) -> str:
    if request.has_static_cache:
        return "static"
    cache = request.call.cache
    return "dynamic" if cache is None or type(cache) is DynamicCache else type(cache).__name__


def _shapes(request: Request) -> dict[str, Any]:
    """Shapes of the forwards over a static cache, and whether they are compiled."""
    call = request.call
    if not request.has_static_cache:
        return {}
    widths, capacity = shapes_of(call, 1 + request.budget + request.extra_columns)
    shapes: dict[str, Any] = {"widths": widths, "capacity": capacity}
    if compile_settings(call) is None:
        return shapes
    if (reason := reason_against_compiling(request.model)) is not None:
        return shapes | {"notes": (f"{request.model_name} is not compiled: {reason}",)}
    shapes["is_compiled"] = True
    if isinstance(head := request.network, DraftHead):
        reason = reason_against_head(call, head)
        note = () if reason is None else (f"{type(head).__name__} is not compiled: {reason}",)
        shapes |= {"is_head_compiled": reason is None, "notes": note}
    return shapes


def _network(request: Request) -> str | None:
    return type(request.network).__name__ if request.drafts_with_network else None


def _budget_reason(request: Request) -> str:
    if request.budget == 0:
        return "the method drafts nothing"
    config = type(request.config).__name__ if request.method.name else "a drafter of your own"
    each = "" if request.costs is None else "; each step verifies as many as save time"
    return f"the most that {config} allows{each}"


def drafting_of(
    request: Request, plan: CallPlan
) -> tuple[BaseDraftRunner | None, Callable[[int, torch.Generator | None], BaseDrafter]]:
    """The network that drafts in a planned call, if one does, and what makes the drafter of a row.

    Returns:
        The runner, and a function of the row's number and of its random generator.
    """
    call, state = request.call, state_of(request.model)
    draft_runner = _draft_runner(request, plan)
    logits_processor = None if draft_runner is None else logits_processor_of(call)
    translations = None if draft_runner is None else request.translations
    is_fixed = torch.are_deterministic_algorithms_enabled()
    costs = state.step_costs(request.model, request.device, is_fixed=is_fixed, is_static=request.has_static_cache)
    token_cost = functools.partial(costs.token_cost, dtype=request.model.dtype)
    jump = functools.partial(costs.jump, dtype=request.model.dtype)

    def make_drafter(row: int, generator: torch.Generator | None) -> BaseDrafter:
        context = DrafterContext(
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
        return request.method.make(request.config, context)

    return draft_runner, make_drafter


def _draft_runner(request: Request, plan: CallPlan) -> BaseDraftRunner | None:
    """The runner of the call's draft network."""
    call = request.call
    network = request.network
    if network is None or not request.drafts_with_network:
        return None
    if isinstance(network, DraftHead):
        return head_runner_of(call, network, budget=request.budget, compiles=plan.is_head_compiled)
    tier, draft_facts = request.draft
    return draft_runner_of(
        call,
        network,
        tier=tier,
        budget=request.budget,
        facts=draft_facts,
        translations=request.translations,
    )
