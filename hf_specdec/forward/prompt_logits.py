"""The likeliest tokens after each token of a prompt, by its last hidden states and a part of the output head.

transformers computes logits of a prompt's last token alone. Of a large vocabulary those of all tokens take longer than
what a draft gains by them, so only some columns are computed: the first token ids, which tokenizers give to frequent
tokens, and the prompt's own tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.common.replaced import Replacement, replaced, this_thread
from hf_specdec.common.transfer import to_device
from hf_specdec.methods.common.node_logits import Array, read_logits

TopTokens = tuple[Array, Array]  # `(n, count)` next tokens, likeliest first, and their log probabilities
AskedRow = tuple[Sequence[int], int]  # tokens that end a row's prompt, and how many next tokens of each are wanted

NUM_FREQUENT = 1_024  # token ids looked at besides the prompt's own; all ids bring half a percent more tokens a step
NEAR = 0.02  # that rounding may add to a logit, relative to the largest


class _Kept(Replacement):
    """Keeps the last hidden states, `(batch, columns, hidden_size)`, that a model's base computes."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        states = getattr(output, "last_hidden_state", None)
        if this_thread.states is not None and isinstance(states, torch.Tensor) and states.ndim == 3:
            this_thread.states.append(states)
        return output


def keeping_states(model: PreTrainedModel, states: list[torch.Tensor]) -> replaced:
    """A block in which `states` gets the last hidden states of each forward."""
    return replaced([_Kept(model.base_model)], wraps=True, states=states)


def top_of_prompts(
    model: PreTrainedModel, states: Sequence[torch.Tensor], last: torch.Tensor, wanted: Sequence[AskedRow]
) -> list[TopTokens | None]:
    """The likeliest tokens after those asked for, of each row.

    Args:
        states: the last hidden states of the prompts, `(batch, columns, hidden_size)`, in pieces.
        last: `(batch, vocab_size)`, the model's logits after the prompts.

    Returns:
        Those after each token but the last; `None` where nothing was asked for or kept.
    """
    if not states:
        return [None for _ in wanted]
    whole = torch.cat(list(states), dim=1)
    return [
        _top_of_row(model, whole[row, -len(tokens) :], last[row], tokens[-whole.shape[1] :], count) if tokens else None
        for row, (tokens, count) in enumerate(wanted)
    ]


@torch.no_grad()
def _top_of_row(
    model: PreTrainedModel, states: torch.Tensor, last: torch.Tensor, tokens: Sequence[int], count: int
) -> TopTokens | None:
    """Those of one row, of `(n, hidden_size)` states; `None` where these and the head's weights do not make its logits.

    They may be projected, scaled, capped, quantized or on several devices.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return None
    weight, vocab_size = head.weight, len(last)
    if weight.device != states.device or weight.dtype != states.dtype or weight.shape[1] != states.shape[-1]:
        return None
    if len(weight) < vocab_size or len(tokens) < 2:
        return None
    looked_at = np.union1d(np.arange(min(NUM_FREQUENT, vocab_size)), [token for token in tokens if token < vocab_size])
    if len(looked_at) < count:
        return None
    (ids,) = to_device([looked_at], weight.device)
    logits = nn.functional.linear(states, weight[ids], None if head.bias is None else head.bias[ids])  # (n, ids)
    error = (logits[-1] - last[ids]).abs().max() / last.abs().max()
    if not float(error) <= NEAR:
        return None
    read = read_logits(logits[:-1], count)
    return looked_at[read[:, 1 : 1 + count].astype(np.int64)], read[:, 1 + count :]
