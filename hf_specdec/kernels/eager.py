"""Finds out what the plain attention function of a model's file computes: by its parameters, and by trying it."""

import functools
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from hf_specdec.kernels.core_attention import CoreAttention

USUAL = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout"}
EXTRAS = {"softcap", "position_bias"}  # that the core computes
IGNORED = {"sliding_window"}  # the mask has it


@functools.cache
def what_it_reads(function: FunctionType) -> frozenset[str] | None:
    """Find what a function `(module, query, key, value, attention_mask, ...)` reads besides usual arguments.

    Of `"softcap"`, `"position_bias"` and the module's `"sinks"`; `None` where its result is not the core's for random
    numbers.
    """
    code = function.__code__
    named = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    if not named <= USUAL | EXTRAS | IGNORED:
        return None
    at = torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=at, dtype=torch.float32, device="cpu")
    query, key, value, added = random(2, 4, 3, 16), random(2, 4, 5, 16), random(2, 4, 5, 16), random(1, 4, 3, 5)
    mask = torch.full_like(added[:, :1], torch.finfo(added.dtype).min).triu(3)
    cap, bias = 1.0 if "softcap" in named else None, added if "position_bias" in named else None
    sinks = random(4) if "sinks" in code.co_names else None
    read = {"softcap": cap, "position_bias": bias, "sinks": sinks}
    module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=sinks)
    kwargs: dict[str, Any] = {name: read[name] for name in EXTRAS & named}
    try:
        attended = function(module, query, key, value, mask, scaling=0.5, dropout=0.0, **kwargs)[0]
    except AttributeError:  # it reads more of a module
        return None
    by_core = CoreAttention(query, key, value, mask, 0.5, is_causal=False, bias=bias, cap=cap, sinks=sinks)
    if not (by_core.fits and torch.allclose(attended, by_core(), atol=1e-4)):
        return None
    return frozenset(name for name, value in read.items() if value is not None)
