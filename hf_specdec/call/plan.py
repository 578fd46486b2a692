"""Makes the plan of a call from its request and from facts: one way of decoding, with the reason."""

from collections.abc import Iterable
from typing import Any

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.call.rules import CALL_RULES, CHECKED_RULES, CHECKS, MODEL_RULES, REQUEST_CHECKS, Rule
from hf_specdec.call.rules.assisted import by_transformers
from hf_specdec.call.rules.length import scaled_trees
from hf_specdec.common.stats import CallPlan
from hf_specdec.compat.attention import takes_tensor_masks
from hf_specdec.engine.static_shapes import (
    compile_settings,
    holds_states,
    reason_against_compiling,
    reason_against_head,
    shapes_of,
)
from hf_specdec.errors import ConfigError, UnsupportedModelError, counted
from hf_specdec.methods.common.draft_head import DraftHead

NO_METHOD = CallPlan(way="plain", reason="no spec_method is given", method="plain", loop="transformers")


def plan_request(facts: Facts, request: Request) -> CallPlan | None:
    """Plan of a call that transformers' own `generate` decodes; `None` where the prepared call decides.

    Raises:
        ConfigError: an argument of the call does not go with its method.
    """
    fields: dict[str, Any] = {"method": request.name, "loop": "transformers"}
    try:
        for check in REQUEST_CHECKS:
            check(facts, request)
    except ConfigError as error:
        if not request.is_default:
            raise
        note = f"{facts.name} decodes without its default spec_method: {error}"
        return CallPlan(way="plain", reason=str(error), notes=(note,), **fields)
    if (reason := by_transformers(facts, request)) is None:
        return None
    network, notes = type(request.assistant_model).__name__, (f"{facts.name}: {reason}",)
    return CallPlan(way="chain", reason=reason, network=network, notes=notes, **fields)


def plan_call(facts: Facts, request: Request) -> CallPlan:
    """Plan of a prepared call.

    Raises:
        ConfigError, UnsupportedModelError: the call asks for a method that its model or inputs cannot serve.
    """
    if (reason := _first_reason(MODEL_RULES, facts, request)) is None:
        if facts.tier == "tree" and (columns := scaled_trees(facts, request)) is not None:
            facts = facts.with_chains_only(columns)
        reason = (
            _first_reason(CALL_RULES, facts, request)
            or _refusal(facts, request)
            or _first_reason(CHECKED_RULES, facts, request)
        )
    inputs: dict[str, Any] = {"num_rows": facts.num_rows, "cache": _cache(facts)}
    if reason is not None:
        return _plain(facts, request, reason, **inputs)
    return _speculative(facts, request, **inputs, **_shapes(facts, request))


def plan_row(facts: Facts, request: Request) -> CallPlan:
    """Plan of a prepared prompt that shares a batch, unless a rule decodes it plainly.

    Raises:
        ConfigError, UnsupportedModelError: as of `plan_call`.
    """
    for check in CHECKS:
        check(facts, request)
    if (reason := _first_reason(CHECKED_RULES, facts, request)) is not None:
        return _plain(facts, request, reason)
    return _speculative(facts, request, shares_batch=True)


def plan_model(facts: Facts, request: Request) -> CallPlan:
    """Plan of a call with one prompt, as far as its model decides it: nothing is prepared."""
    reason = _first_reason(MODEL_RULES, facts, request)
    return _speculative(facts, request) if reason is None else _plain(facts, request, reason)


def _first_reason(rules: Iterable[Rule], facts: Facts, request: Request) -> str | None:
    return next((reason for rule in rules if (reason := rule(facts, request)) is not None), None)


def _refusal(facts: Facts, request: Request) -> str | None:
    """Runs the checks: a refusal of a method by default is returned, that of any other raised."""
    try:
        for check in CHECKS:
            check(facts, request)
    except (ConfigError, UnsupportedModelError) as error:
        if not request.is_default:
            raise
        return str(error)
    return None


def _plain(facts: Facts, request: Request, reason: str, **inputs: Any) -> CallPlan:
    note = f"{facts.name} decodes without speculation: {reason}"
    return CallPlan(way="plain", reason=reason, method=request.name, loop="transformers", notes=(note,), **inputs)


def _speculative(facts: Facts, request: Request, *, notes: tuple[str, ...] = (), **more: Any) -> CallPlan:
    if facts.tier == "chain" and not takes_tensor_masks(facts.probed.capability.attention):
        notes += (f"{facts.name} verifies chains only: {facts.tier_reason}",)
    return CallPlan(
        way=facts.tier,
        reason=facts.tier_reason,
        method=request.name,
        loop="assisted" if request.is_assisted else "own",
        network=_network(facts, request),
        budget=request.budget,
        budget_reason=_budget_reason(facts, request, more.get("num_rows", 1)),
        rounding_reason=_rounding_reason(facts, request, **more),
        notes=notes,
        **more,
    )


def _rounding_reason(facts: Facts, request: Request, *, is_compiled: bool = False, **_: Any) -> str | None:
    if request.is_assisted:
        return "transformers' loop computes by torch's kernels, which are chosen by the number of tokens"
    if is_compiled:
        return "a compiled forward has kernels for each number of tokens"
    return facts.rounding_reason


def _cache(facts: Facts) -> str:
    if facts.has_static_cache:
        return "static"
    is_dynamic = facts.cache is None or type(facts.cache) is compat.DynamicCache
    return "dynamic" if is_dynamic else type(facts.cache).__name__


def _shapes(facts: Facts, request: Request) -> dict[str, Any]:
    """Shapes of the forwards over a static cache, and whether they are compiled."""
    if not facts.has_static_cache or holds_states(facts.cache):
        return {}
    widths, capacity = shapes_of(facts.call, 1 + request.budget + request.extra_columns)
    shapes: dict[str, Any] = {"widths": widths, "capacity": capacity, "is_compiled": False}
    if compile_settings(facts.call) is None:
        return shapes
    if (reason := reason_against_compiling(facts.model)) is not None:
        return shapes | {"notes": (f"{facts.name} is not compiled: {reason}",)}
    shapes["is_compiled"] = True
    if isinstance(head := facts.network(request), DraftHead):
        reason = reason_against_head(facts.call, head)
        note = () if reason is None else (f"{type(head).__name__} is not compiled: {reason}",)
        shapes |= {"is_head_compiled": reason is None, "notes": note}
    return shapes


def _network(facts: Facts, request: Request) -> str | None:
    if (layers := request.config.drafting_layers) is not None:
        return f"the first {counted(layers, 'layer')} of {facts.name}"
    return type(facts.network(request)).__name__ if facts.drafts_with_network(request) else None


def _budget_reason(facts: Facts, request: Request, num_rows: int) -> str:
    if request.budget == 0:
        return "the method drafts nothing"
    config = "a drafter of your own" if request.method is None else type(request.config).__name__
    if (costs := facts.costs(request)) is None:
        return f"the most that {config} allows"
    curve = costs.curve(num_rows)
    origin = "by earlier steps" if curve.is_known else "assumed"
    size = 1 + request.budget
    ratio = f"a forward of {size} takes {curve.ratio(size):.1f} times as long as one of a single token ({origin})"
    return f"the most that {config} allows; each step verifies as many as save time: {ratio}"
