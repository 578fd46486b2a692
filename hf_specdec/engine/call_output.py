"""The output object of a call with `return_dict_in_generate`: plain generation's class, with the same contents."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.models import batch_dim_of_states
from hf_specdec.engine.call import Call
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.forward.hidden_states import Layers

Part = TypeVar("Part")
SHOWN = {
    "scores": "output_scores",
    "logits": "output_logits",
    "hidden_states": "output_hidden_states",
}


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
