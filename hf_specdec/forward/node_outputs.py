"""What a forward of the target says of one row's nodes."""

from dataclasses import dataclass

import torch

from hf_specdec.methods.node_logits import NodeLogits

__all__ = ["NodeOutputs"]


@dataclass(frozen=True, slots=True)
class NodeOutputs:
    """What a forward computed for one row's nodes and extra tokens, or for its prompt.

    Attributes:
        logits (`NodeLogits`): of a prompt, its last token's.
        hidden_states (`tuple[Tensor, ...]`): `(C, hidden_size)` for each of `ModelRunner.hidden_layers`; of a prompt,
            all tokens that its forward computed.
    """

    logits: NodeLogits
    hidden_states: tuple[torch.Tensor, ...] = ()
