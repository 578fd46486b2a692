"""Static caches: whether a call can keep one, and the shapes that all of its forwards after the prompt have."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.common.transfer import is_host
from hf_specdec.compat.fingerprint import is_library_code
from hf_specdec.distributed.rank_sync import rank_sync_of
from hf_specdec.engine.call import Call
from hf_specdec.engine.length_rules import HIDDEN_LENGTH
from hf_specdec.engine.model_state import compiled_beside, state_of
from hf_specdec.errors import ConfigError
from hf_specdec.forward.target.adapters import takes_positions
from hf_specdec.forward.target.compiled_forward import CompiledForward, CompiledShapes, StepKind
from hf_specdec.forward.target.model_runner import MAX_UNCACHED
from hf_specdec.forward.target.rotary import rotary_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter

GRAIN = 64  # the smallest capacity, and what capacities are multiples of
ROUND_WIDTHS = 4  # columns of a head's round, over its widest forward: more make its buffers grow
FLAT_WIDTHS = (1, 2, 16, 32, 64, 96)  # an accelerator computes any number of tokens up to each in about the same time
FLAT_TOKENS = 128  # of all rows, in about the time of one
SERVING_WIDTH = FLAT_WIDTHS[1]  # of the graph in which one token runs at first


def reason_against_static(call: Call, tier: str, engine: str) -> str | None:
    """Why a call with a static cache is decoded plainly, or `None`."""
    if not has_static_cache(call):
        return None
    if engine == "assisted":
        return 'engine="assisted" takes no static cache'
    if compat.attends_to_images(call.model.config):
        return "its static cache holds an image's keys and values among the text's"
    if compat.given_states(call.model, call.model_kwargs):
        return "self- and cross-attention share its static cache"
    return _reason_against_buffers(call.model, tier, _cache_of(call))


def _reason_against_buffers(model: PreTrainedModel, tier: str, cache: Any) -> str | None:
    """Why a model is not driven over buffers of fixed shape in the place of a static cache, or `None`."""
    if tier != "tree":
        return "over a static cache only models of the tree tier are driven"
    if model.config.is_encoder_decoder or not takes_positions(model):
        return "over a static cache only decoders that take position_ids are driven"
    known = (compat.StaticLayer, compat.StaticSlidingWindowLayer, compat.DummyLayer)
    strange = [type(layer).__name__ for layer in cache.layers if type(layer) not in known]
    return f"its static cache holds more than keys and values ({strange[0]})" if strange else None


def check_cache(call: Call) -> None:
    """Refuse caches of the caller's that cannot be handed back as plain generation would leave them.

    Raises:
        ConfigError: the cache is offloaded or quantized, or a static one that is too short for the longest text.
    """
    cache = _cache_of(call)
    if not compat.is_users_own(cache):
        return
    inner = getattr(cache, "self_attention_cache", cache)
    if getattr(inner, "offloading", False) or isinstance(inner, compat.QuantizedCache):
        kind = f"offloaded {type(inner).__name__}" if getattr(inner, "offloading", False) else type(inner).__name__
        remedy = "Pass a DynamicCache or a StaticCache without offloading, or leave it out."
        raise ConfigError(compat.CACHE, "must be neither offloaded nor quantized with spec_method", kind, remedy)
    if not isinstance(inner, compat.StaticCache):
        return
    needed = _columns_of(call)
    for layer, full in zip(inner.layers, compat.unbounded_layers(inner, call.model), strict=True):
        if type(layer) is not compat.DummyLayer and layer.max_cache_len < min(full.max_cache_len, needed):
            raise ConfigError(
                compat.CACHE,
                f"must have a max_cache_len of at least {needed} for a text of that length with spec_method",
                layer.max_cache_len,
                "Make a longer StaticCache, or lower max_new_tokens.",
            )


def has_static_cache(call: Call) -> bool:
    """Whether a call goes over a static cache, which an encoder-decoder holds within its own."""
    cache = _cache_of(call)
    return isinstance(getattr(cache, "self_attention_cache", cache), compat.StaticCache)


def fixed_shapes(call: Call, drafters: Iterable[BaseDrafter], budget: int) -> FixedShapes | None:
    """What a call over a static cache needs, whatever its drafters propose; `None` where the cache is another."""
    cache = _cache_of(call)
    if not isinstance(cache, compat.StaticCache):
        return None
    width = 1 + budget + max(drafter.max_extra_tokens for drafter in drafters)
    # A forward that the caller compiled counts its shapes together, and torch gives up after a few.
    on_host = is_host(call.model.device)
    widths = (width,) if compat.is_compiled(call.model) else forward_widths(width, on_host)
    beyond = widths[-1] if on_host else max(widths[-1], FLAT_WIDTHS[-1])  # methods share their graphs and buffers
    columns = max(_columns_of(call), cache.get_max_length()) + beyond
    return FixedShapes(widths, capacity_for(columns), 0 if on_host else FLAT_TOKENS, _is_undisturbed(call, call.model))


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


def compiled_forward(call: Call, fixed: FixedShapes | None) -> CompiledForward | None:
    """What runs a call's forwards compiled, where plain generate would compile its own; `None` where it would not.

    A model whose forward the caller has compiled is left as it is.
    """
    return None if fixed is None else _compiled_forward(call.model, call, call.model_kwargs)


@dataclass(frozen=True, slots=True)
class DraftShapes:
    """What a draft model's forwards need to be compiled: a static cache, the shapes over it, and what runs them."""

    cache: compat.StaticCache
    fixed: FixedShapes
    compiled: CompiledForward


def draft_shapes(call: Call, draft: PreTrainedModel, *, tier: str, num_columns: int, budget: int) -> DraftShapes | None:
    """For a draft model beside a target over a static cache, where plain generate would compile the draft's forwards.

    Elsewhere `None`: over a dynamic cache a forward that is not compiled attends to less.

    Args:
        num_columns (`int`): tokens of the draft's longest text.
        budget (`int`): most tokens that it drafts a step.
    """
    target_cache = _cache_of(call)
    if not isinstance(target_cache, compat.StaticCache):
        return None
    num_columns = max(num_columns, target_cache.get_max_length())  # generate's own never gets shorter again
    flat_tokens = 0 if is_host(draft.device) else FLAT_TOKENS
    widths = forward_widths(1 + budget, not flat_tokens)
    growth = max(after / (before + 1) for before, after in itertools.pairwise((0, *widths)))  # of a forward, at most
    growth = max(growth, min(widths[-1], SERVING_WIDTH if flat_tokens else 1))
    capacity = capacity_for(num_columns + math.ceil(growth * (1 + budget + MAX_UNCACHED)))
    cache = compat.StaticCache(config=compat.text_config(draft.config), max_cache_len=capacity)
    reason = _reason_against_buffers(draft, tier, cache)
    compiled = _compiled_forward(draft, call, {compat.CACHE: cache}, reason)
    if compiled is None or compiled.reason is not None:
        return None
    compiled_beside(call.model, draft)
    return DraftShapes(cache, FixedShapes(widths, capacity, flat_tokens, _is_undisturbed(call, draft)), compiled)


def head_shapes(call: Call, head: DraftHead, kind: StepKind, *, num_columns: int, widest: int) -> CompiledShapes | None:
    """For a draft head beside a target whose forwards are compiled; `None` beside any other.

    Args:
        kind: of `CompiledForward`.
        num_columns (`int`): tokens of the longest text.
        widest (`int`): most columns of a forward.
    """
    target_cache = _cache_of(call)
    if not isinstance(target_cache, compat.StaticCache):
        return None
    target = _compiled_forward(call.model, call, call.model_kwargs)
    if target is None or target.reason is not None:
        return None
    if (reason := _reason_against_head(call, head)) is not None:
        state_of(head).warn_once(f"{type(head).__name__} is not compiled: {reason}")
        return None
    compiled = state_of(head).compiled_forward(head, target.settings, kind)
    if compiled.reason is not None:
        return None
    compiled_beside(call.model, head)
    num_columns = max(num_columns, target_cache.get_max_length())  # generate's own never gets shorter again
    widths = forward_widths(widest, is_host(call.model.device))
    capacity = capacity_for(num_columns + (ROUND_WIDTHS - 1) * widest + widths[-1])
    return CompiledShapes(FixedShapes(widths, capacity, is_undisturbed=_is_undisturbed(call, head)), compiled)


def _reason_against_head(call: Call, head: DraftHead) -> str | None:
    """Why a head is not compiled beside a target that is, or `None`."""
    if not rank_sync_of(call.model).is_alone:
        return "its output head may be shared between processes"
    if rotary_of(head) is not None:
        return HIDDEN_LENGTH
    return None


def _compiled_forward(
    model: PreTrainedModel, call: Call, model_kwargs: Mapping[str, Any], reason: str | None = None
) -> CompiledForward | None:
    """What runs a model's forwards compiled by the call's settings, unless there is a `reason` against it."""
    if compat.is_compiled(model):
        return None
    settings = compat.compile_settings(model, call.generation_config, model_kwargs)
    if settings is None:
        return None
    if rotary_of(model) is not None:
        reason = reason or HIDDEN_LENGTH
    if compat.has_row_hooks(model):
        reason = "PEFT's adapter_names and task_ids are hooks of one call, which a compiled forward would keep"
    if reason is not None:
        state_of(model).warn_once(f"{type(model).__name__} is not compiled: {reason}")
        return None
    return state_of(model).compiled_forward(model, settings)


def _is_undisturbed(call: Call, network: torch.nn.Module) -> bool:
    """Of `FixedShapes`, for forwards of `network`."""
    return call.is_undisturbed and is_library_code(network)


def _cache_of(call: Call) -> Any:
    return call.model_kwargs.get(compat.cache_name(call.model_kwargs))


def _columns_of(call: Call) -> int:
    """Tokens that plain generation would have in the cache at most: all but the last one."""
    num_read = compat.prompt_length(call.input_ids, call.generation_config, call.model_kwargs)
    return num_read + max(call.max_new_tokens or 1, 1) - 1
