"""Compiling on a CPU, and ways to count graphs instead of making code of them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig

from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache

__all__ = ["METHODS", "STATIC", "LendingCompiler", "Recorder", "counting", "on_cpu"]
STATIC: dict[str, Any] = {"cache_implementation": "static", "do_sample": False}
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 6}},
    "lookahead": {"spec_method": "lookahead", "spec_config": {"window_size": 3, "ngram_size": 3}},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 6}},
}


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
        marked: dict[str, set[int]] = {}  # by the argument's name: dimensions that one graph takes of any size
        self.kinds.append(kinds)

        def run(**inputs: Any) -> Any:
            kinds.add(tuple(_kind_of(value, name, marked) for name, value in sorted(inputs.items())))
            return function(**inputs)

        return run

    @property
    def num_graphs(self) -> int:
        """Graphs that torch would have made."""
        return sum(map(len, self.kinds))


def _kind_of(value: Any, name: str, marked: dict[str, set[int]]) -> Any:
    """What torch compiles a function for: shapes but for marked dimensions, types, numbers, and a cache's buffers."""
    if isinstance(value, torch.Tensor):
        free = marked.setdefault(name, set())
        free |= getattr(value, "_dynamo_weak_dynamic_indices", set())
        return name, tuple(None if dim in free else size for dim, size in enumerate(value.shape)), value.dtype
    if isinstance(value, StaticSpecCache):
        layers = [layer for layer in value.layers if isinstance(layer, SpecLayer) and layer.is_initialized]
        return tuple((_kind_of(layer.keys, name, marked), layer.keys.data_ptr()) for layer in layers)
    if isinstance(value, tuple):
        return tuple(_kind_of(ours, f"{name} {place}", marked) for place, ours in enumerate(value))
    if isinstance(value, dict):
        return tuple(_kind_of(ours, f"{name} {key}", marked) for key, ours in sorted(value.items()))
    return name, value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


class LendingCompiler:
    """In the place of torch's compiler: every call writes over what earlier ones have returned, as CUDA graphs may."""

    def __init__(self) -> None:
        self.lent: list[torch.Tensor] = []

    def __call__(self, function: Callable[..., Any], settings: Any) -> Callable[..., Any]:
        """Takes the place of `compat.compiled`."""

        def run(**inputs: Any) -> Any:
            for tensor in self.lent:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            result = function(**inputs)
            outputs, second = result
            tensors = [
                outputs,
                second,
                getattr(outputs, "logits", None),
                *(getattr(outputs, "hidden_states", None) or ()),
            ]
            self.lent = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            return result

        return run
