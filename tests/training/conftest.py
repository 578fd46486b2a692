"""A tiny target, its prompts, and settings that train a head in seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.tools.train import HeadReport, HeadTraining, train_head

PROMPTS = [" ".join(str((start * step) % 37 + 2) for step in range(1, 5)) for start in range(1, 37)]
CONFIG = HeadTraining(max_length=40, max_new_tokens=20, rollout_steps=3, held_out=0.3)
ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": 4,
    "per_device_train_batch_size": 4,
    "eval_steps": 8,
    "learning_rate": 2e-2,
    "show_progress": False,
}


class WordNumbers:
    """A tokenizer as far as training needs one: words are token ids."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


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


def train(target: Any, out: Path, data: Any = PROMPTS, config: HeadTraining = CONFIG, **kwargs: Any) -> HeadReport:
    """Train on the prompts that all tests share, unless told otherwise."""
    return train_head(target, kwargs.pop("tokenizer", WordNumbers()), data, out, config, **ARGUMENTS | kwargs)


@pytest.fixture(scope="module")
def trained(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadReport]:
    """One training that ran to its end, its folder and report."""
    folder = tmp_path_factory.mktemp("trained") / "head"
    return folder, train(target, folder)
