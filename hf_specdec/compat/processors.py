"""Private parts of transformers' logits processors, and what their lists cost."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import LogitsProcessorList

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_order(processors: LogitsProcessorList) -> Process:
    """Applies the processors in order, as `processors(input_ids, scores)` does, for many calls.

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


def take_prefix_row(processor: Any, row: int) -> None:
    """Make a `PrefixConstrainedLogitsProcessor` that of one row; neither of its attributes has a public name.

    The user's function gets the number that it gets for that row of the batch: its prompt's, or before transformers
    5.24 the row's own, where `num_return_sequences` is above 1.
    """
    allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
    processor._prefix_allowed_tokens_fn, processor._num_beams = (lambda _, ids: allowed(number, ids)), 1
