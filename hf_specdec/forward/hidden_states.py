"""Hidden states and attention weights that a runner's last forward has computed."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.rollback import RollbackCache
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.forward.tree_layout import TreeLayout

Layers = tuple[torch.Tensor | None, ...] | None  # a field of a forward's output, an entry for each layer


class HiddenStates:
    """Hidden states and attention weights of the last forward."""

    model: PreTrainedModel
    outputs: Any
    cache: RollbackCache
    hidden_layers: tuple[int, ...]
    compiled: CompiledForward | None
    _layouts: list[TreeLayout]

    def shown(self, field: str) -> Layers:
        """A field of the prompt's forward, as plain generation gives it.

        Args:
            field: `hidden_states`, `(batch, columns, ..., hidden_size)` a layer, some with `streams` before;
                `attentions` or `cross_attentions`, `(batch, heads, columns, keys)` a layer, or `None`.
        """
        if not (layers := self._field(field)) or field != "attentions":
            return layers
        pairs = zip(layers, self._windows(layers), strict=True)
        return tuple(
            layer if layer is None or window is None else layer[..., -(window - 1 + layer.shape[-2]) :]
            for layer, window in pairs
        )

    def shown_of(self, field: str, row: int, node: int) -> Layers:
        """Copies of a node's part of a field of the last forward, as a forward of its token alone gives them."""
        if not (layers := self._field(field)):
            return layers
        windows = self._windows(layers) if field == "attentions" else [None] * len(layers)
        pairs = zip(layers, windows, strict=True)
        return tuple(None if layer is None else self._part(field, layer, row, node, window) for layer, window in pairs)

    def _field(self, field: str) -> Layers:
        layers = self.outputs.get(f"decoder_{field}") or self.outputs.get(field)
        return None if layers is None else tuple(layers)

    def _windows(self, layers: Sequence[object]) -> list[int | None]:
        """Sliding window of each layer."""
        return compat.sliding_windows(self.model, self.cache.handed_out) or [None] * len(layers)

    def _part(self, field: str, layer: torch.Tensor, row: int, node: int, window: int | None) -> torch.Tensor:
        """A node's part of one layer; of its attention the keys of the text and of its path, the last `window`."""
        layout, dim = self._layouts[row], batch_dim(self.model, field, layer)
        of_columns = dim + 1 if field == "hidden_states" else dim + 2
        part = layer.narrow(dim, row, 1).narrow(of_columns, layout.column_of(node), 1)
        if field != "attentions":
            return part.clone()
        start = layer.shape[-1] - len(layout)
        if self.cache.spec is not None:  # rows are of different lengths
            start -= max(self.cache.spec.lengths) - self.cache.spec.lengths[row]
        assert layout.tree is not None
        keys = [*range(start), *(start + column for column in layout.columns_of(layout.tree.path(node)))]
        kept = torch.tensor(keys if window is None else keys[-window:], device=part.device)
        return part.index_select(-1, kept)

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
        states = cast("Sequence[torch.Tensor]", self._field("hidden_states") or ())
        check_states(self.model, states, self.hidden_layers)
        return states


def batch_dim(model: PreTrainedModel, field: str, layer: torch.Tensor) -> int:
    """Dimension of the batch in a layer of a forward's `field`."""
    return compat.batch_dim_of_states(model, layer) if field == "hidden_states" else 0


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
