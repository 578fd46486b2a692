"""Forwards of the target that record, for each token, what the states of its layers are made of.

A block, in the thread that enters it:

    recorder = StateRecorder(model, facts)
    recorder.begin(cache, layouts)
    with recorder.applied(cache):
        model(**inputs)

In it a layer's own forward runs over functions that continue the cache's states along every path of a tree
(`kernels/recurrences.py`), in the place of those of the layer's file that compute several tokens. Other threads compute
as always.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.state_layer import Columns, StateLayer
from hf_specdec.common.replaced import Replacement, replaced, this_thread
from hf_specdec.compat import state_layers
from hf_specdec.compat.models import is_compiled
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.text_rows import TreeLayout
from hf_specdec.kernels.layers import unseen
from hf_specdec.kernels.products import alike_in
from hf_specdec.kernels.recurrences import convolution, gated_delta_rule, state_space_duality

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    state_layers.CONVOLUTION: convolution,
    **dict.fromkeys(state_layers.DELTA_RULES, gated_delta_rule),
    state_layers.MAMBA_2: state_space_duality,
}


class StateRecorder:
    """The layers with states of one model.

    Args:
        is_used: whether forwards are recorded.

    Attributes:
        layers: none where the model has none, or one that is not known, or whose forward is compiled or replaced.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, *, is_used: bool = True) -> None:
        layers = facts.of(state_layers.known_state_layers, model) if is_used else ()
        is_free = all(type(vars(layer).get("forward")) in (type(None), _Forward) for layer in layers)
        self.layers = layers if is_free and not (layers and is_compiled(model)) else ()
        self._columns: Columns | None = None  # of the last forward

    def begin(self, cache: SpecCache | None, layouts: Sequence[TreeLayout]) -> None:
        """A forward of the rows' new columns begins."""
        if self.layers and cache is not None:
            before = self._columns if layouts[0].first_new else None
            self._columns = Columns(np.stack([layout.visible() for layout in layouts]), before)
            cache.record(self._columns)

    def applied(self, cache: SpecCache | None) -> replaced:
        """A block whose forwards record the new columns; without layers or a cache nothing changes."""
        if not self.layers or cache is None:
            return replaced()
        return replaced(map(_Forward, self.layers), recorded=cache)


class _Forward(Replacement):
    """The forward of a layer over functions that continue states along the paths of a tree."""

    __slots__ = ("_call",)

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)
        self._call = MethodType(_forward_of(type(layer).forward), layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if this_thread.recorded is None:
            return self.original(*args, **kwargs)
        with alike_in(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))):
            return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self.module,)


@functools.cache
def _forward_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    return state_layers.forward_over(forward, REPLACEMENTS, _replacement)


def _replacement(name: str) -> Callable[..., Any]:
    """A function for several tokens, by the layer of the recorded cache whose states the model has asked for last."""
    replace = REPLACEMENTS[name]
    taken = inspect.signature(replace).parameters

    def compute(*args: Any, **kwargs: Any) -> Any:
        cache, recorder = this_thread.recorded, this_thread.recorder
        assert cache is not None and isinstance(cache.state_layer, StateLayer)
        layer, kwargs = cache.state_layer, {key: value for key, value in kwargs.items() if key in taken}
        with unseen(), contextlib.nullcontext() if recorder is None else recorder.paused():
            result = replace(layer, *args, **kwargs)
        if recorder is not None:
            recorder.states(layer, replace, args, kwargs, result)
        return result if name == state_layers.CONVOLUTION else (result, layer.recurrent_states[0])

    return compute
