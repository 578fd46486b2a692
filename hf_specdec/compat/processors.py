"""Private parts of transformers' logits processors, and what their lists cost."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import LogitsProcessorList

__all__ = ["in_order", "replace_prefix_function"]

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_order(processors: LogitsProcessorList) -> Process:
    """What `processors(input_ids, scores)` computes, for many calls.

    A `LogitsProcessorList` looks at the signature of each processor in every call, some 50 microseconds each. Here that
    is done once. A list that needs more than ids and scores, or is a class of its own, stays what it is.
    """
    try:
        takes_two = all(len(inspect.signature(processor.__call__).parameters) <= 2 for processor in processors)
    except (TypeError, ValueError):  # no signature: the list raises at its first call, as in plain decoding
        takes_two = False
    if type(processors) is not LogitsProcessorList or not takes_two:
        return cast("Process", processors)

    def call(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in processors:
            scores = processor(input_ids, scores)
        return scores

    return call


def replace_prefix_function(processor: Any, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change the user's function inside a `PrefixConstrainedLogitsProcessor`, which has no public name for it."""
    processor._prefix_allowed_tokens_fn = replace(processor._prefix_allowed_tokens_fn)
