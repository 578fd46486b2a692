"""How transformers compiles decoding, and what torch's compiler offers.

Names                              Why
`_valid_auto_compile_criteria`     when plain generate compiles a forward, by itself or when asked
`_default_compile_config`          how, where the caller says nothing
`torch._dynamo.utils.counters`     graphs that were made, of which `torch.compile` says nothing
`isolate_recompiles`               of `torch.compile` from 2.12 on: the graphs of one function do not count for another
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

__all__ = ["compile_settings", "compiled", "mark_step_begin", "num_compiled"]


def compile_settings(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments of `torch.compile` where plain generate would compile its steps; `None` where it would not.

    As there, `dynamic` is `None` unless the caller says otherwise: what changes is made dynamic when it changes.
    """
    if "llama4" in model.config.model_type:  # transformers' `get_compiled_call` leaves it out as well
        return None
    if not model._valid_auto_compile_criteria(dict(model_kwargs), generation_config):
        return None
    config = generation_config.compile_config or model._default_compile_config()
    settings: dict[str, Any] = config.to_dict()
    if settings.get("options") is not None:
        settings.pop("mode")  # torch takes one of them
    return settings


def compiled(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, compiled at its first call, with graphs that other functions of the same code do not share."""
    options = dict(settings)
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    else:
        function = _with_own_code(function)
    found: Callable[..., Any] = torch.compile(function, **options)
    return found


def _with_own_code(function: Any) -> FunctionType:
    """A copy of the function with a code object of its own, for which torch counts graphs."""
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def num_compiled() -> int:
    """Graphs that torch has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def mark_step_begin() -> None:
    """What earlier compiled forwards returned is not needed any more: CUDA graphs may write over it."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
