"""What the model card reports: held-out loss, agreement of draft and target, share of looping continuations."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specdec.embedded.training.objectives import loop_mask, next_token


def held_out_loss(model: PreTrainedModel, tokens: np.ndarray, *, window: int = 512) -> float:
    """Nats a token over consecutive windows, none of whose tokens was trained on. `tokens` is `(num_tokens,)`."""
    with torch.no_grad():
        losses = [next_token(model, batch).item() for batch in _windows(tokens, window)]
    return float(np.mean(losses))


def agreement(draft: PreTrainedModel, target: PreTrainedModel, tokens: np.ndarray, *, window: int = 512) -> float:
    """Share of held-out positions where both models' most likely next token is the same."""
    with torch.no_grad():
        same = [
            (draft(input_ids=b).logits.argmax(-1) == target(input_ids=b).logits.argmax(-1)).float().mean().item()
            for b in _windows(tokens, window)
        ]
    return float(np.mean(same))


def looping_share(
    model: PreTrainedModel, tokens: np.ndarray, *, prompts: int = 64, prompt_length: int = 64, new_tokens: int = 128
) -> float:
    """Share of greedy continuations of held-out text that go round in circles somewhere in their `new_tokens`.

    In circles: one piece of at most 48 tokens three times in a row (`objectives.loop_mask`).
    """
    starts = np.linspace(0, len(tokens) - prompt_length - 1, prompts).astype(int)
    ids = torch.from_numpy(np.stack([tokens[s : s + prompt_length] for s in starts]).astype(np.int64))
    text = model.generate(input_ids=ids.to(model.device), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return loop_mask(text[:, prompt_length:]).any(1).float().mean().item()


def _windows(tokens: np.ndarray, window: int, rows: int = 8) -> Iterator[torch.Tensor]:
    count = len(tokens) // window
    stacked = torch.from_numpy(tokens[: count * window].astype(np.int64).reshape(count, window))
    yield from torch.split(stacked, rows)
