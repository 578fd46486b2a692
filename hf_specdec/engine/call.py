"""One call of `generate` as transformers prepared it, and the output with its statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specdec.common.stats import SpecStats
from hf_specdec.compat.caches import CACHE, cache_name
from hf_specdec.compat.fingerprint import Fingerprint, fingerprint
from hf_specdec.compat.generation import prompt_length
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.per_row import PerRow
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.forward.model_facts import ModelFacts

UNBOUNDED = 1024  # new tokens that buffers are made for where nothing bounds a text
MOST_ROOM = 4096  # new tokens that buffers are made for at once


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call, as `generate` prepared them for a decoding method.

    Attributes:
        model_kwargs: everything else the model's forward gets: masks, positions, cache, encoder outputs.
        user_callbacks: other code of the caller's that runs between the forwards: an observer, a drafter, a streamer.
        now: the model's fingerprint.
        facts: facts that follow from its structure.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any = None
    user_callbacks: tuple[Any, ...] = ()
    now: Fingerprint = field(init=False, repr=False)
    facts: ModelFacts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", fingerprint(self.model))
        object.__setattr__(self, "facts", state_of(self.model).facts_of(self.now))

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens that a text gets after its prompt; `None` where nothing bounds them."""
        longest = self.generation_config.max_length
        return int(longest) - self.input_ids.shape[1] if longest else None

    @property
    def cache(self) -> Any:
        """The cache among `model_kwargs`, or `None`."""
        return self.model_kwargs.get(cache_name(self.model_kwargs))

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the call may come to, those of earlier turns counted."""
        num_read = prompt_length(self.input_ids, self.generation_config, self.model_kwargs)
        return num_read + max(self.max_new_tokens or 0, 0)

    def reaches(self, length: int) -> bool:
        """Returns whether a text of the call may get as long as `length`, those of earlier turns counted."""
        return self.max_new_tokens is None or self.longest >= length

    @property
    def reads_embeddings(self) -> bool:
        """True if the prompt's forward reads `inputs_embeds`, with or without token ids."""
        return not self.model.config.is_encoder_decoder and self.model_kwargs.get("inputs_embeds") is not None

    @property
    def room(self) -> int:
        """Tokens after the prompt that buffers of token ids are made for; they grow where texts get longer."""
        most = self.max_new_tokens
        return min(UNBOUNDED if most is None else most, MOST_ROOM)

    @property
    def is_padded(self) -> bool:
        """True if the mask of the prompts hides tokens."""
        mask = self.model_kwargs.get("attention_mask")
        return isinstance(mask, torch.Tensor) and not (self.model.config.is_encoder_decoder or bool(mask.all()))

    @property
    def is_undisturbed(self) -> bool:
        """True if no streamer, processor, criterion, observer or drafter of the caller's runs at each token."""
        called = [*self.logits_processor, *self.stopping_criteria, *self.user_callbacks]
        return not any(
            isinstance(item, PerRow | PrefixConstrainedLogitsProcessor)  # which ask a function of the caller's
            or not type(item).__module__.startswith(("transformers.", "hf_specdec."))
            for item in called
        )

    def prompt_of(self, row: int) -> list[int]:
        """The prompt of one row without the masked tokens at its front."""
        tokens: list[int] = self.input_ids[row].tolist()
        mask = self.model_kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] != len(tokens) or not tokens:
            return tokens
        seen = mask[row].bool()
        return tokens[int(seen.int().argmax()) if bool(seen.any()) else 0 :]

    def decoding_arguments(self) -> dict[str, Any]:
        """The arguments that transformers' own decoding methods take after `input_ids`."""
        return {
            "logits_processor": self.logits_processor,
            "stopping_criteria": self.stopping_criteria,
            "generation_config": self.generation_config,
            "synced_gpus": False,
            "streamer": self.streamer,
            **self.model_kwargs,
        }


def with_stats(output: Any, stats: SpecStats) -> Any:
    """The output object with `.spec_stats`; a bare tensor stays as it is."""
    if not isinstance(output, torch.Tensor):
        output.spec_stats = stats
    return output


def call_output(call: Call, sequences: Sequence[SequenceState], cache: Any, ids: torch.Tensor) -> Any:
    """Output of plain generation's class from the ended `sequences`; of several, nothing of each token is shown.

    Args:
        cache: for the caller.
        ids: `(batch, longest)`: all texts, padding after those that have ended before.
    """
    sampler, fields = sequences[0].sampler, {"sequences": ids, CACHE: cache}
    fields |= {} if sampler.scores is None else {"scores": tuple(sampler.scores)}
    fields |= {} if sampler.logits is None else {"logits": tuple(sampler.logits)}
    is_decoder = not call.model.config.is_encoder_decoder
    return GenerateDecoderOnlyOutput(**fields) if is_decoder else GenerateEncoderDecoderOutput(**fields)
