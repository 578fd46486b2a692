"""Static caches: the shapes that all forwards of a call after the prompt have, and whether these are compiled."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache, StaticLayer, StaticSlidingWindowLayer

from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.common.stats import CallPlan
from hf_specdec.common.transfer import is_host
from hf_specdec.compat import compiling
from hf_specdec.compat.attention import rotary_modules, rotary_switch
from hf_specdec.compat.caches import CACHE, DummyLayer
from hf_specdec.compat.devices import is_shared
from hf_specdec.compat.fingerprint import hooks_of, is_library_code
from hf_specdec.compat.models import is_compiled, takes_positions, text_config
from hf_specdec.engine.call import Call
from hf_specdec.engine.model_state import state_of
from hf_specdec.forward.compiled_forward import (
    MODEL_STEP,
    CompiledForward,
    CompiledShapes,
    StepKind,
)
from hf_specdec.forward.model_runner import MAX_UNCACHED
from hf_specdec.methods.common.draft_head import DraftHead

HIDDEN_LENGTH = "its rotary frequencies follow the text's length, which a compiled forward hides"
GRAIN = 64  # the smallest capacity, and what capacities are multiples of
ROUND_WIDTHS = 4  # columns of a head's round, over its widest forward: more make its buffers grow
FLAT_WIDTHS = (1, 2, 16, 32, 64, 96)  # an accelerator computes any number of tokens up to each in about the same time
FLAT_TOKENS = 128  # of all rows, in about the time of one
SERVING_WIDTH = FLAT_WIDTHS[1]  # of the graph in which one token runs at first


def reason_against_buffers(model: PreTrainedModel, tier: str, cache: Any) -> str | None:
    """Reason not to put buffers of fixed shape in the place of a static cache; `None` where they can be."""
    if tier != "tree":
        return "over a static cache only models of the tree tier are driven"
    if model.config.is_encoder_decoder or not takes_positions(model):
        return "over a static cache only decoders that take position_ids are driven"
    layer_types = (StaticLayer, StaticSlidingWindowLayer, DummyLayer)
    strange = [type(layer).__name__ for layer in cache.layers if type(layer) not in layer_types]
    return f"its static cache holds more than keys and values ({strange[0]})" if strange else None


def shapes_of(call: Call, width: int) -> tuple[tuple[int, ...], int]:
    """Widths of the forwards and columns of the buffers of a call over a static cache.

    Args:
        width (`int`): most tokens of a row in one forward.
    """
    # A forward that the caller compiled counts its shapes together, and torch gives up after a few.
    on_host = is_host(call.model.device)
    widths = (width,) if is_compiled(call.model) else forward_widths(width, on_host)
    beyond = widths[-1] if on_host else max(widths[-1], FLAT_WIDTHS[-1])  # methods share their graphs and buffers
    return widths, capacity_for(max(longest_cache(call), call.cache.get_max_length()) + beyond)


def fixed_shapes(call: Call, plan: CallPlan) -> FixedShapes:
    """Shapes of a plan that has some."""
    flat_tokens = 0 if is_host(call.model.device) else FLAT_TOKENS
    return FixedShapes(plan.widths, plan.capacity, flat_tokens, _is_undisturbed(call, call.model))


def longest_cache(call: Call) -> int:
    """Tokens that plain generation would have in the cache at most: all but the last one."""
    return call.longest - 1 if (call.max_new_tokens or 0) > 0 else call.longest


def forward_widths(most: int, on_host: bool) -> tuple[int, ...]:
    """Widths that forwards of up to `most` tokens have, ascending.

    On a CPU, where each token takes its time, the powers of two below `most`, and `most`. On an accelerator few, the
    same for all methods: there a CUDA graph is recorded for each, and tokens cost little.
    """
    if on_host:
        return (*(1 << power for power in range((most - 1).bit_length())), most)
    lower = [width for width in FLAT_WIDTHS if width < most]
    return (*lower, next((width for width in FLAT_WIDTHS if width >= most), most))


def capacity_for(columns: int) -> int:
    """At least `columns`: a multiple of `GRAIN`, and from 512 on an eighth more at most.

    Calls of about the same length share their graphs.
    """
    grain = max(GRAIN, 1 << max(columns.bit_length() - 4, 0))
    return -(-columns // grain) * grain


def compile_settings(call: Call) -> dict[str, Any] | None:
    """Arguments of `torch.compile` where plain generate would compile the target's forwards; `None` where not."""
    return _settings(call, call.model, call.model_kwargs)


def reason_against_compiling(model: torch.nn.Module) -> str | None:
    """Reason not to compile a model's forwards; `None` where they can be compiled."""
    if rotary_switch(rotary_modules(model)) is not None:
        return HIDDEN_LENGTH
    return "a graph would hold what its hooks did when it was made" if hooks_of(model) else None


def compiled_target(call: Call) -> CompiledForward:
    """Compiled forward of the target, for a call whose plan compiles it."""
    settings = compile_settings(call)
    assert settings is not None
    return state_of(call.model).compiled_forward(call.model, settings, MODEL_STEP)


@dataclass(frozen=True, slots=True)
class DraftShapes:
    """Static cache of a draft model, the shapes of the forwards over it, and its compiled forward."""

    cache: StaticCache
    fixed: FixedShapes
    compiled: CompiledForward


def draft_shapes(call: Call, draft: PreTrainedModel, *, tier: str, num_columns: int, budget: int) -> DraftShapes | None:
    """For a draft model next to a target over a static cache, where plain generate would compile the draft's forwards.

    Elsewhere `None`: over a dynamic cache a forward that is not compiled attends to less.

    Args:
        num_columns (`int`): tokens of the draft's longest text.
        budget (`int`): most tokens that it drafts a step.
    """
    if not isinstance(call.cache, StaticCache):
        return None
    num_columns = max(num_columns, call.cache.get_max_length())  # generate's own never gets shorter again
    flat_tokens = 0 if is_host(draft.device) else FLAT_TOKENS
    widths = forward_widths(1 + budget, not flat_tokens)
    growth = max(after / (before + 1) for before, after in itertools.pairwise((0, *widths)))  # of a forward, at most
    growth = max(growth, min(widths[-1], SERVING_WIDTH if flat_tokens else 1))
    capacity = capacity_for(num_columns + math.ceil(growth * (1 + budget + MAX_UNCACHED)))
    cache = StaticCache(config=text_config(draft.config), max_cache_len=capacity)
    settings = _settings(call, draft, {CACHE: cache})
    if settings is None:
        return None
    if (reason := reason_against_compiling(draft) or reason_against_buffers(draft, tier, cache)) is not None:
        state_of(draft).warn_once(f"{type(draft).__name__} is not compiled: {reason}")
        return None
    compiled = state_of(draft).compiled_forward(draft, settings)
    if compiled.reason is not None:
        return None
    return DraftShapes(cache, FixedShapes(widths, capacity, flat_tokens, _is_undisturbed(call, draft)), compiled)


def head_shapes(call: Call, head: DraftHead, kind: StepKind, *, num_columns: int, widest: int) -> CompiledShapes | None:
    """For a draft head that its call's plan compiles; `None` where the target's or its own forwards have failed to.

    Args:
        kind: of `CompiledForward`.
        num_columns (`int`): tokens of the longest text.
        widest (`int`): most columns of a forward.
    """
    target = compiled_target(call)
    if target.reason is not None:
        return None
    compiled = state_of(head).compiled_forward(head, target.settings, kind)
    if compiled.reason is not None:
        return None
    num_columns = max(num_columns, call.cache.get_max_length())  # generate's own never gets shorter again
    widths = forward_widths(widest, is_host(call.model.device))
    capacity = capacity_for(num_columns + (ROUND_WIDTHS - 1) * widest + widths[-1])
    return CompiledShapes(FixedShapes(widths, capacity, is_undisturbed=_is_undisturbed(call, head)), compiled)


def reason_against_head(call: Call, head: DraftHead) -> str | None:
    """Reason not to compile a head next to a compiled target; `None` where it can be."""
    if is_shared(call.model):
        return "its output head may be shared between processes"
    return reason_against_compiling(head)


def _settings(call: Call, model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings as of `compile_settings` for one model; `None` where the caller has compiled its forward."""
    if is_compiled(model):
        return None
    return compiling.compile_settings(model, call.generation_config, model_kwargs)


def _is_undisturbed(call: Call, network: torch.nn.Module) -> bool:
    """True if nothing of the user's sees or replaces forwards of `network`."""
    return call.is_undisturbed and is_library_code(network)
