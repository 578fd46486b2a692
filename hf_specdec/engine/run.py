"""One call, from prepared inputs to the output object: the tier's way of decoding, and what comes back.

Takes what `generate` hands to a decoding method. Knows no method by name.

    output = decode_speculatively(call, drafter, tier="tree", budget=10, stats=SpecStats())
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specdec import compat
from hf_specdec.drafters.base import Drafter
from hf_specdec.engine.assisted import CountedCandidates
from hf_specdec.engine.choose import Chooser, StopCheck
from hf_specdec.engine.loop import SpecLoop
from hf_specdec.engine.step import SpecStep
from hf_specdec.engine.target import Target, Tier
from hf_specdec.engine.text import Text
from hf_specdec.errors import ConfigError
from hf_specdec.stats import SpecStats

__all__ = ["Call", "decode_assisted", "decode_plain", "decode_speculatively"]


@dataclass(frozen=True, slots=True)
class Call:
    """What `generate` prepared for one call.

    Attributes:
        model_kwargs: everything else the model's forward gets: masks, positions, cache, encoder outputs.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any = None

    def methods_arguments(self) -> dict[str, Any]:
        """As transformers' own decoding methods take them."""
        return {
            "logits_processor": self.logits_processor,
            "stopping_criteria": self.stopping_criteria,
            "generation_config": self.generation_config,
            "synced_gpus": False,
            "streamer": self.streamer,
            **self.model_kwargs,
        }


def decode_speculatively(
    call: Call,
    drafter: Drafter,
    *,
    tier: Tier,
    budget: int,
    stats: SpecStats,
    observer: Callable[[SpecStep], None] | None = None,
) -> Any:
    """Decode one row in our loop; returns what plain generation would return, with `.spec_stats`."""
    config, model = call.generation_config, call.model
    original = call.model_kwargs.get("past_key_values")
    keep_cache = bool(config.return_dict_in_generate) or getattr(original, "_is_user_defined", False)
    target = Target(model, call.input_ids, config, call.model_kwargs, tier=tier, keep_cache=keep_cache)
    stats.tier = target.tier
    stop_check = StopCheck(call.stopping_criteria)
    room = min((stop_check.max_length or 1024) - call.input_ids.shape[1], 4096)
    text = Text(call.input_ids, room=room)
    chooser = Chooser(call.logits_processor, config, call.input_ids.device)
    loop = SpecLoop(
        target,
        drafter,
        chooser,
        stop_check,
        text,
        budget=budget,
        stats=stats,
        max_positions=getattr(compat.text_config(model.config), "max_position_embeddings", None),
        vocab_size=getattr(compat.text_config(model.config), "vocab_size", None),
        streamer=call.streamer,
        observer=observer,
        keep_hidden_states=bool(config.return_dict_in_generate and config.output_hidden_states),
    )
    loop.run()
    if call.streamer is not None:
        call.streamer.end()
    sequences = text.ids().clone()
    if not config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": _tuple(chooser.scores),
        "logits": _tuple(chooser.logits),
        "past_key_values": original,
    }
    hidden_states = _tuple(loop.hidden_states)
    if model.config.is_encoder_decoder:
        encoder = call.model_kwargs["encoder_outputs"].get("hidden_states") if config.output_hidden_states else None
        output = GenerateEncoderDecoderOutput(
            **fields, decoder_hidden_states=hidden_states, encoder_hidden_states=encoder
        )
    else:
        output = GenerateDecoderOnlyOutput(**fields, hidden_states=hidden_states)
    return with_stats(output, stats)


def decode_assisted(call: Call, drafter: Drafter, *, stats: SpecStats) -> Any:
    """Decode with transformers' assisted loop and our drafter as its candidate generator."""
    if call.input_ids.shape[1] == 0:
        raise ConfigError("engine", 'must be "loop" for inputs_embeds', "assisted", "Drop the engine setting.")
    candidates = CountedCandidates(drafter, stats)
    try:
        output = compat.assisted_decoding(call.model, candidates, call.input_ids, **call.methods_arguments())
    finally:
        if candidates.begun:
            drafter.end()
    return with_stats(output, stats)


def decode_plain(call: Call, *, stats: SpecStats) -> Any:
    """Decode with transformers' own greedy search or sampling."""
    output = compat.sample(call.model, call.input_ids, **call.methods_arguments())
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    stats.num_tokens = len(sequences) * (sequences.shape[1] - call.input_ids.shape[1])
    return with_stats(output, stats)


def with_stats(output: Any, stats: SpecStats) -> Any:
    """The output object with `.spec_stats`; a bare tensor stays as it is."""
    if not isinstance(output, torch.Tensor):
        output.spec_stats = stats
    return output


def _tuple(items: list[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)
