"""What both kinds of training are tried on: a tiny target, its prompts, and settings that take seconds."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS: dict[str, Any] = {
    "num_texts": 48,
    "prompt_tokens": 4,
    "new_tokens": 20,
    "texts_per_shard": 8,
    "batch_size": 4,
    "rollout_steps": 3,
    "epochs": 3.0,
    "eval_every": 8,
    "held_out": 0.3,
    "learning_rate": 1e-2,
}
PROMPTS = [" ".join(str((start * step) % 37 + 2) for step in range(1, 9)) for start in range(1, 40)]


class WordNumbers:
    """A tokenizer as far as training asks: words are token ids."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """A tiny target that writes loops, which a head can learn."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
