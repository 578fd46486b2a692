"""Compiling on a CPU, and ways to count graphs instead of making code of them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig

from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache

__all__ = ["LendingCompiler", "Recorder", "counting", "on_cpu"]


def on_cpu(backend: Any, **settings: Any) -> CompileConfig:
    """Compile here too: plain generate has the same switch."""
    config = CompileConfig(backend=backend, **settings)
    config._compile_all_devices = True
    return config


def counting(graphs: list[Any]) -> Callable[..., Any]:
    """Adds an entry to `graphs` for each graph."""

    def count(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        graphs.append(inputs)
        return module.forward

    return count


class Recorder:
    """In the place of torch's compiler: runs functions as they are written, and says where torch would compile.

    Attributes:
        kinds: for each function that was to be compiled, the kinds of arguments that it got: one graph for each.
    """

    def __init__(self) -> None:
        self.kinds: list[set[Any]] = []

    def __call__(self, function: Callable[..., Any], settings: Any) -> Callable[..., Any]:
        """Takes the place of `compat.compiled`."""
        kinds: set[Any] = set()
        self.kinds.append(kinds)

        def run(**inputs: Any) -> Any:
            kinds.add(tuple((name, _kind_of(value)) for name, value in sorted(inputs.items())))
            return function(**inputs)

        return run

    @property
    def num_graphs(self) -> int:
        """Graphs that torch would have made."""
        return sum(map(len, self.kinds))


def _kind_of(value: Any) -> Any:
    """What torch compiles a function for: shapes, types, numbers, and where the buffers of a cache are."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, StaticSpecCache):
        layers = [layer for layer in value.layers if isinstance(layer, SpecLayer) and layer.is_initialized]
        return tuple((tuple(layer.keys.shape), layer.keys.data_ptr()) for layer in layers)
    if isinstance(value, tuple):
        return tuple(_kind_of(own) for own in value)
    if isinstance(value, dict):
        return tuple((name, _kind_of(own)) for name, own in sorted(value.items()))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


class LendingCompiler:
    """In the place of torch's compiler: every call writes over what earlier ones have returned, as CUDA graphs may."""

    def __init__(self) -> None:
        self.lent: list[torch.Tensor] = []

    def __call__(self, function: Callable[..., Any], settings: Any) -> Callable[..., Any]:
        """Takes the place of `compat.compiled`."""

        def run(**inputs: Any) -> Any:
            for tensor in self.lent:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            found = function(**inputs)
            outputs, second = found
            tensors = [
                outputs,
                second,
                getattr(outputs, "logits", None),
                *(getattr(outputs, "hidden_states", None) or ()),
            ]
            self.lent = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            return found

        return run
