"""One call of `generate` as transformers prepared it, and the output with its statistics."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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
from hf_specdec.compat.models import batch_dim_of_states
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.per_row import PerRow
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.forward.hidden_states import Layers
from hf_specdec.forward.model_facts import ModelFacts

UNBOUNDED = 1024  # new tokens that buffers are made for where nothing bounds a text
SHOWN = {"scores": "output_scores", "logits": "output_logits", "hidden_states": "output_hidden_states"}
Part = TypeVar("Part")
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


def shown_fields(call: Call) -> list[str]:
    """Fields of the call's output that hold something of each token."""
    config = call.generation_config
    return [name for name, setting in SHOWN.items() if config.return_dict_in_generate and getattr(config, setting)]


def call_output(
    call: Call, sequences: Sequence[SequenceState], prompt_states: Layers, cache: Any, ids: torch.Tensor
) -> Any:
    """Output of plain generation's class from the ended `sequences`, which are taken apart.

    Args:
        prompt_states: the hidden states of the prompts' forward, where they are shown.
        cache: for the caller.
        ids: `(batch, longest)`: all texts, padding after those that have ended before.
    """
    samplers, count = [sequence.sampler for sequence in sequences], ids.shape[1] - call.input_ids.shape[1]
    fields: dict[str, Any] = {"sequences": ids, CACHE: cache}
    shows = shown_fields(call)
    if "scores" in shows:
        fields["scores"] = _joined([sampler.scores or [] for sampler in samplers], count, torch.cat)
    if "logits" in shows:
        fields["logits"] = _joined([sampler.logits or [] for sampler in samplers], count, torch.cat)
    if "hidden_states" in shows:
        of_rows = [sequence.shown_states for sequence in sequences]
        joined = _joined(of_rows, count - 1, functools.partial(_by_layer, call))
        fields["hidden_states"] = (prompt_states, *joined)
    if not call.model.config.is_encoder_decoder:
        return GenerateDecoderOnlyOutput(**fields)
    if "hidden_states" in fields:
        fields["decoder_hidden_states"] = fields.pop("hidden_states")
        fields["encoder_hidden_states"] = call.model_kwargs["encoder_outputs"].get("hidden_states")
    return GenerateEncoderDecoderOutput(**fields)


def _joined(rows: list[list[Part]], count: int, join: Callable[[list[Part]], Part]) -> tuple[Part, ...]:
    """The first `count` of each row, those of one step together; the rows are used up, so that none is held twice."""
    if len(rows) == 1:
        return tuple(rows[0])
    for row in rows:
        del row[count:]
        row.reverse()
    return tuple([join([row.pop() for row in rows]) for _ in range(count)])


def _by_layer(call: Call, parts: list[Layers]) -> Layers:
    """One step's hidden states of all rows, joined layer by layer."""
    if parts[0] is None:
        return None
    layers = zip(*cast("list[tuple[torch.Tensor, ...]]", parts), strict=True)
    return tuple([torch.cat(rows, batch_dim_of_states(call.model, rows[0])) for rows in layers])
