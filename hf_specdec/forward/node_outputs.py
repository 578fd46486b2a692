"""Outputs of the target's forward: its hidden states, and what belongs to one row's nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specdec.common.transfer import to_device
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.methods.common.node_logits import Array, NodeLogits

TopTokens = tuple[Array, Array]  # `(n, count)` next tokens, likeliest first, and their log probabilities
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


@dataclass(frozen=True, slots=True)
class NodeOutputs:
    """Outputs of a forward for one row's nodes and extra tokens, or for its prompt.

    Attributes:
        logits (`NodeLogits`): of a prompt, its last token's.
        hidden_states (`tuple[Tensor, ...]`): `(C, hidden_size)` for each of `ModelRunner.hidden_layers`; of a prompt,
            all tokens that its forward computed.
        of_prompt (`tuple[Array, Array] | None`): of a prompt, the likeliest tokens after those before its last.
    """

    logits: NodeLogits
    hidden_states: tuple[torch.Tensor, ...] = ()
    of_prompt: TopTokens | None = None

    def states_along(self, path: Sequence[int]) -> list[torch.Tensor]:
        """`(len(path), hidden_size)` of each layer: the states of these nodes; views where they are the first ones."""
        if not self.hidden_states or list(path) == list(range(len(path))):  # a chain's are
            return [layer[: len(path)] for layer in self.hidden_states]
        (index,) = to_device([np.array(path)], self.hidden_states[0].device)
        return [layer[index.to(layer.device)] for layer in self.hidden_states]
