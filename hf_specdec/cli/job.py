"""One way of calling `generate`, timed. Knows nothing about what it is compared with.

job = Job(model, tokenizer, {"max_new_tokens": 64})
result = job.run(inputs, spec_method="prompt_lookup")
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.stats import SpecStats

__all__ = ["ForwardCount", "Job", "Result", "count_forwards"]


@dataclass(frozen=True, slots=True)
class Result:
    """What one call gave.

    Attributes:
        token_ids (`list[int]`): the new tokens, the prompt left out.
        seconds (`float`): wall-clock time of the call.
        stats (`SpecStats | None`): what was drafted and accepted; `None` for transformers' own loops.
    """

    token_ids: list[int]
    seconds: float
    stats: SpecStats | None


@dataclass(frozen=True, slots=True)
class Job:
    """A model with the options that all its calls share.

    Attributes:
        options (`Mapping[str, Any]`): keyword arguments of `generate`.
        seed (`int | None`): set before each call; `None` leaves the random state as it is.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def run(self, inputs: Mapping[str, torch.Tensor], **how: Any) -> Result:
        """Call `generate` on one prompt; `how` holds the arguments that choose the method."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        started = time.perf_counter()
        output = self.model.generate(**inputs, **self.options, return_dict_in_generate=True, **how)
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - started
        return Result(token_ids, seconds, getattr(output, "spec_stats", None))


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
