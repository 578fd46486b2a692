"""Tensors that a cache holds, of whatever class it is."""

from collections.abc import Iterator
from typing import Any

import torch

from hf_specdec.compat.caches import holds_states


def contents(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a cache, its layers and their lists and dictionaries, in the order of its attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
    elif isinstance(value, dict):
        yield from contents(list(value.values()))
    elif holds_states(value):
        yield from contents(vars(value))
