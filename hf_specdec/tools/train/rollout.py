"""The module that is trained: a head's own draft steps over whole texts, with their loss.

The paper's training-time test (arXiv 2503.01840, section 3.2): draft step k of a position reads the state that step
k - 1 ended with, and sees the text's columns up to its own and, of the later steps, its own columns. Texts stand in
for the target's choices, so what is counted on the target's own texts is what a chain of drafts would have kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import log_softmax, pad
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.compat.devices import input_device
from hf_specdec.forward.node_outputs import check_states
from hf_specdec.methods.eagle3.network import Eagle3Head


class HeadRollout(nn.Module):
    """A head, rolled out over texts that the target reads in the same forward.

    Args:
        head: what is trained.
        target: gives hidden states, labels and, where the head has none, embeddings; no part of this module's weights.
        layer_ids: hidden states that the head reads.
        steps: draft steps of each position.
        decay: weight of a step's loss over that of the step before.
    """

    def __init__(
        self, head: Eagle3Head, target: PreTrainedModel, layer_ids: Sequence[int], *, steps: int, decay: float
    ) -> None:
        super().__init__()
        self.head, self.layer_ids, self.steps, self.decay = head, list(layer_ids), steps, decay
        self._target = [target]  # a list keeps the target out of this module's weights

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, learned: torch.Tensor, first: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Roll out every position from which a token is learned. Position i is the pair of token i + 1 and state i.

        Args:
            input_ids, attention_mask: `(N, L)`, padded on both sides.
            learned: `(N, L)` bool, tokens that have a loss.
            first: `(N,)`, the first column of `learned` that holds one; the same in all rows.

        Returns:
            loss: `()`, cross-entropy under the target's distributions over the draft vocabulary, a sum over the steps.
            accepted: `(N, steps)`, positions whose drafts up to each step were the text's tokens.
            num_positions: `(N,)`, positions that could have been accepted.
        """
        head, start = self.head, max(int(first[0]) - 1, 0)
        features, embeddings, labels, is_draftable = self._targets_part(input_ids, attention_mask)
        real = attention_mask.bool()
        states, mask = head.fuse(features[:, :-1]), _visible(real)  # (N, L - 1, hidden_size), (N, 1, L - 1, L - 1)
        keys = torch.arange(1, mask.shape[-1] + 1, device=mask.device).expand(len(mask), -1)
        cache = DynamicCache()
        if start:  # pairs of the prompt are in the head's cache, as when it drafts, and have no loss of their own
            with torch.no_grad():
                read = embeddings[:, 1 : start + 1], states[:, :start], keys[:, :start]
                head(*read, mask[:, :, :start, :start], cache, key_positions=keys[:, :start])
        states, mask, positions = states[:, start:], mask[:, :, start:], keys[:, start:]
        diagonal = torch.eye(states.shape[1], dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        loss, kept = states.new_zeros((), dtype=torch.float32), real[:, start:-1]
        accepted = []
        for step in range(self.steps):
            tokens = _from(embeddings, start + 1 + step, states.shape[1])
            states = head(tokens, states, positions + step, mask, cache, key_positions=keys)
            logits = head.logits(states).float()  # (N, length, draft_vocab_size): of token start + i + 2 + step
            counts = _from(learned, start + 2 + step, states.shape[1])
            if not step:
                num_positions = counts.sum(-1)
            used = counts & _from(is_draftable, start + 1 + step, states.shape[1])
            nats = -(_from(labels, start + 1 + step, states.shape[1]) * log_softmax(logits, dim=-1)).sum(-1)
            loss = loss + self.decay**step * (nats * used).sum() / used.sum().clamp(min=1)
            chosen = head.target_ids[logits.argmax(-1)]
            kept = kept & counts & (chosen == _from(input_ids, start + 2 + step, states.shape[1]))
            accepted.append(kept.sum(-1))
            mask, keys = torch.cat([mask, diagonal], dim=-1), torch.cat([keys, positions + step + 1], dim=1)
        return {"loss": loss, "accepted": torch.stack(accepted, dim=-1), "num_positions": num_positions}

    @torch.no_grad()
    def _targets_part(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the target on the texts; return its outputs on the head's device.

        Returns:
            features: `(N, L, num_features * hidden_size)`, its hidden states side by side.
            embeddings: `(N, L, hidden_size)` of the tokens.
            labels: `(N, L, draft_vocab_size)`, its distribution after each token, over what the head can draft.
            is_draftable: `(N, L)` bool, whether its likeliest token is among these.
        """
        head, target = self.head, self._target[0]
        device, dtype = input_device(target), head.fc.weight.dtype
        ids, seen = input_ids.to(device), attention_mask.to(device)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        outputs: Any = target(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions,
            output_hidden_states=self.layer_ids,
            use_cache=False,
        )
        check_states(target, outputs.hidden_states or (), self.layer_ids)
        states = [outputs.hidden_states[layer].to(head.device, dtype) for layer in self.layer_ids]
        embed = head.embed_tokens or target.get_input_embeddings()
        embeddings = embed(input_ids if head.embed_tokens else ids).to(head.device, dtype)
        logits, target_ids = outputs.logits.to(head.device), head.target_ids
        labels = logits[..., target_ids].float().softmax(-1)
        is_draftable = torch.isin(logits.argmax(-1), target_ids)
        return torch.cat(states, dim=-1), embeddings, labels, is_draftable


def _from(values: torch.Tensor, column: int, length: int) -> torch.Tensor:
    """`(N, length, ...)` of `(N, L, ...)` from `column` on, zeros behind the end."""
    part = values[:, column : column + length]
    return pad(part, (*(0, 0) * (part.ndim - 2), 0, length - part.shape[1]))


def _visible(real: torch.Tensor) -> torch.Tensor:
    """Mask of pairs, `(N, 1, L - 1, L - 1)` bool: causal, with itself, without padding."""
    length = real.shape[1] - 1
    causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    diagonal = torch.eye(length, dtype=torch.bool, device=real.device)
    return ((causal & real[:, None, :-1]) | diagonal)[:, None]
