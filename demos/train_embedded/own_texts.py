"""Texts that the finished target writes itself: what its draft is asked about."""

import numpy as np
import torch
from transformers import PreTrainedModel

from demos.train_embedded.corpus import pieces

TEMPERATURE = 0.7


def own_texts(
    target: PreTrainedModel,
    tokens: np.ndarray,
    *,
    num_texts: int,
    prompt_length: int = 64,
    new_tokens: int = 192,
    rows: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """`num_texts` pieces of `tokens`, each continued by `target`: half of them greedily, half at temperature 0.7.

    Returns:
        One `uint16` array of `num_texts * (prompt_length + new_tokens)` tokens.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    written: list[np.ndarray] = []
    for first in range(0, num_texts, rows):
        starts = rng.integers(len(tokens) - prompt_length, size=min(rows, num_texts - first))
        prompts = pieces(tokens, starts, prompt_length)
        draws = (
            {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if first // rows % 2 else {"do_sample": False}
        )
        texts = target.generate(
            input_ids=prompts.to(target.device), max_new_tokens=new_tokens, eos_token_id=None, **draws
        )
        written.append(texts.cpu().numpy().astype(np.uint16).reshape(-1))
    return np.concatenate(written)
