"""Hidden states in the output of a forward."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.errors import UnsupportedModelError

Layers = tuple[torch.Tensor, ...] | None  # hidden states of a forward's output, one of each layer


def states_of(outputs: Any) -> Layers:
    """Hidden states of the decoder, each `(batch, columns, ..., hidden_size)`, of some `(streams, batch, ...)`."""
    states = outputs.get("decoder_hidden_states") or outputs.get("hidden_states")
    return None if states is None else tuple(states)


def checked_states(model: PreTrainedModel, states: Layers, layers: Sequence[int]) -> list[torch.Tensor]:
    """States of these layers, `(batch, columns, hidden_size)`; raises as of `check_states`."""
    check_states(model, states or (), layers)
    return [states[layer] for layer in layers] if states else []


def check_states(model: PreTrainedModel, states: Sequence[torch.Tensor], layers: Sequence[int]) -> None:
    """Raise unless a forward gave the hidden states of `layers`; some models give fewer than they have layers, or none.

    Raises:
        UnsupportedModelError: there are fewer, or several streams of them.
    """
    streams = max((states[layer].ndim for layer in layers if layer < len(states)), default=3) - 3
    if streams:
        read = f"A draft head reads one state of a token; {type(model).__name__} has several streams of them."
        raise UnsupportedModelError(f"{read} Use a spec_method without a draft head.")
    if layers and max(layers) >= len(states):
        reads = f"A draft head reads hidden state {max(layers)} of {type(model).__name__}, whose forward gives"
        if not states:
            raise UnsupportedModelError(f"{reads} none. Use a spec_method without a draft head.")
        shown = "0" if len(states) == 1 else f"0 to {len(states) - 1}"
        raise UnsupportedModelError(f"{reads} {shown}. Use a head that reads these, or another spec_method.")
