"""Compiling on a CPU, and a backend that counts graphs instead of making code of them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig

__all__ = ["counting", "on_cpu"]


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
