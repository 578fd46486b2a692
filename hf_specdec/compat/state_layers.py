"""transformers' layers with states: how they are recognised, and their forwards over functions of ours.

Names                              Why
functions of a layer's file        compute several tokens' convolution and recurrence from what the cache says
`__code__`, `__globals__`          a layer's forward is run with other functions under these names, in one block alone
`_hf_hook`                         accelerate moves weights around a forward, which then has to be its own
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionLayer

from hf_specdec.compat.attention import names_read
from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.generation import fresh_cache
from hf_specdec.compat.models import takes_positions
from hf_specdec.compat.modules import modules_of

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = ACT2FN
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
MAMBA_2 = "mamba2_chunk_scan"
NO_LIMIT = (0.0, float("inf"))  # of a time step
RECURRENCES = frozenset((*DELTA_RULES, MAMBA_2))
CACHE_METHODS = frozenset(("update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state"))


def known_state_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The layers with states of a model whose convolutions and recurrences are known, each and all; else none."""
    layers = [module for module in modules_of(model) if names_read(type(module).forward) & CACHE_METHODS]
    return tuple(layers) if all(map(_is_known, layers)) else ()


def has_states_alone(model: PreTrainedModel) -> bool:
    """True if a model is made of known layers with states, and no layer attends: it counts no positions."""
    layers = getattr(fresh_cache(model).get(CACHE), "layers", [])
    is_alone = bool(layers) and all(type(layer) is LinearAttentionLayer for layer in layers)
    return is_alone and bool(known_state_layers(model))


def places_trees(model: PreTrainedModel) -> bool:
    """Returns whether a tree's tokens get their positions: the forward takes positions, or the model has none."""
    return takes_positions(model) or has_states_alone(model)


def limits_time_steps(model: PreTrainedModel) -> bool:
    """True if layers of Mamba-2 limit their time steps, which transformers' do in forwards of several tokens alone."""
    limits = (vars(module).get("time_step_limit", NO_LIMIT) for module in modules_of(model))
    return any(tuple(limit) != NO_LIMIT for limit in limits)


def _is_known(module: torch.nn.Module) -> bool:
    """True if several tokens of a layer are computed by functions of its file that have a replacement."""
    names = names_read(type(module).forward)
    is_moved = any(hasattr(part, "_hf_hook") for part in module.modules())
    is_recurrent = not names.isdisjoint(("update_recurrent_state", "get_recurrent_state"))
    has_functions = CONVOLUTION in names and (not is_recurrent or len(names & RECURRENCES) == 1)
    return type(module).__module__.startswith("transformers.") and has_functions and not is_moved


def forward_over(forward: Callable[..., Any], replaced: Iterable[str], replace: Callable[[str], Any]) -> FunctionType:
    """The forward of a layer's class over other functions, `replace(name)` in the place of those it reads."""
    function = inspect.unwrap(forward)
    assert isinstance(function, FunctionType)
    names = {name: replace(name) for name in replaced if name in names_read(forward)}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
