"""One way of calling `generate`, timed. Knows nothing about what it is compared with."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.common.stats import SpecStats


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one call.

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
        is_chat (`bool`): whether a prompt goes through the chat template, as a user's message.
        system (`str | None`): what a chat's model is told first.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    is_chat: bool = False
    system: str | None = None

    def run(self, inputs: Mapping[str, torch.Tensor], **how: Any) -> Result:
        """Call `generate` on one prompt; `how` holds the arguments that choose the method."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        started = time.perf_counter()
        output = self.model.generate(**inputs, **self.options, return_dict_in_generate=True, **how)
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - started
        return Result(token_ids, seconds, getattr(output, "spec_stats", None))
