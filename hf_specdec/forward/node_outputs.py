"""Outputs of the target's forward for one row's nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_specdec.common.transfer import to_device
from hf_specdec.forward.prompt_logits import TopTokens
from hf_specdec.methods.common.node_logits import NodeLogits


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
