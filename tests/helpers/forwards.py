"""How many forwards a model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

__all__ = ["ForwardCount", "count_forwards"]


@dataclass(slots=True)
class ForwardCount:
    """Calls of a model's forward, and the tokens fed to it."""

    calls: int = 0
    tokens: int = 0


@contextmanager
def count_forwards(model: PreTrainedModel) -> Iterator[ForwardCount]:
    """Count the model's forwards: how drafts show in a loop that keeps no statistics."""
    count = ForwardCount()

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count.calls += 1
        count.tokens += kwargs["input_ids"].shape[1]

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()
