"""The hidden states that a runner's last forward has computed."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.target.compiled_forward import CompiledForward
from hf_specdec.forward.target.tree_layout import TreeLayout


class HiddenStates:
    """Hidden states of the last forward."""

    model: PreTrainedModel
    outputs: Any
    hidden_layers: tuple[int, ...]
    compiled: CompiledForward | None
    _layouts: list[TreeLayout]

    def all_hidden_states(self) -> tuple[torch.Tensor, ...]:
        """States of the last forward, `(batch, columns, ..., hidden_size)` a layer; some have `streams` before."""
        return tuple(self._states())

    def hidden_states(self, row: int, node: int) -> tuple[torch.Tensor, ...]:
        """Copies of those of one node, each as `all_hidden_states` of a batch of one with one column."""
        column = self._layouts[row].node_columns[node] - self._layouts[row].first_new
        found = []
        for layer in self._states():
            dim = compat.batch_dim_of_states(self.model, layer)
            found.append(layer.narrow(dim, row, 1).narrow(dim + 1, column, 1).clone())
        return tuple(found)

    def node_states(self, row: int) -> tuple[torch.Tensor, ...]:
        """States of the nodes that the last forward computed, `(C, hidden_size)` for each of `hidden_layers`."""
        if not self.hidden_layers:
            return ()
        states, new = self._states(), self._layouts[row].new_rows
        return tuple(states[layer][row, new] for layer in self.hidden_layers)

    def prompt_states(self, row: int) -> tuple[torch.Tensor, ...]:
        """States of the tokens that the prompt's forward computed, padding among them, as `node_states`."""
        states = self._states() if self.hidden_layers else ()
        return tuple(states[layer][row] for layer in self.hidden_layers)

    def _states(self) -> Sequence[torch.Tensor]:
        """`(..., batch, columns, ..., hidden_size)` for each layer that was asked for."""
        states = self.outputs.get("decoder_hidden_states") or self.outputs.hidden_states or ()
        check_states(self.model, states, self.hidden_layers)
        return cast("Sequence[torch.Tensor]", states)


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
        known = "0" if len(states) == 1 else f"0 to {len(states) - 1}"
        raise UnsupportedModelError(f"{reads} {known}. Use a head that reads these, or another spec_method.")
