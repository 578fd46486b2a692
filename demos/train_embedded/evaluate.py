"""What the model card reports: held-out loss, agreement of draft and target, share of looping continuations."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from demos.train_embedded.corpus import pieces
from demos.train_embedded.loops import loop_mask
from demos.train_embedded.objectives import next_token

WINDOW, ROWS = 512, 8
NUM_PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 256, 64, 128


def held_out_loss(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """Nats a token over consecutive windows, none of whose tokens was trained on. `tokens` is `(num_tokens,)`."""
    with torch.no_grad():
        losses = [next_token(model, batch).item() for batch in _windows(tokens)]
    return float(np.mean(losses))


def agreement(draft: PreTrainedModel, target: PreTrainedModel, tokens: np.ndarray) -> float:
    """Share of held-out positions where both models' most likely next token is the same."""
    with torch.no_grad():
        same = [
            (draft(input_ids=b).logits.argmax(-1) == target(input_ids=b).logits.argmax(-1)).float().mean().item()
            for b in _windows(tokens)
        ]
    return float(np.mean(same))


def looping_share(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """Share of greedy continuations of held-out text that loop somewhere in their 128 tokens.

    A loop: one piece of at most 48 tokens three times in a row (`loops.loop_mask`).
    """
    continued = _continuations(model, tokens)[:, PROMPT_LENGTH:]
    return loop_mask(continued).any(1).float().mean().item()


def greedy_agreement(draft: PreTrainedModel, target: PreTrainedModel, tokens: np.ndarray) -> float:
    """Share of the target's greedy tokens that are the draft's most likely ones, over the same continuations."""
    text = _continuations(target, tokens)
    with torch.no_grad():
        guesses: torch.Tensor = draft(input_ids=text).logits.argmax(-1)
    return (guesses[:, PROMPT_LENGTH - 1 : -1] == text[:, PROMPT_LENGTH:]).float().mean().item()


def _continuations(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """256 prompts of held-out text, each continued greedily: `(256, 64 + 128)`."""
    starts = np.linspace(0, len(tokens) - PROMPT_LENGTH - 1, NUM_PROMPTS).astype(int)
    ids = pieces(tokens, starts, PROMPT_LENGTH)
    text: torch.Tensor = model.generate(
        input_ids=ids.to(model.device), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return text


def _windows(tokens: np.ndarray) -> Iterator[torch.Tensor]:
    """`(8, 512)` consecutive tokens each, the last one of fewer rows."""
    count = len(tokens) // WINDOW
    stacked = torch.from_numpy(tokens[: count * WINDOW].astype(np.int64).reshape(count, WINDOW))
    yield from torch.split(stacked, ROWS)
