"""A model that is built in a moment: a tiny random Llama with the embedded tokenizer."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.tools.bench import BenchSettings, LoadedModel, Prompt, Records, make_header, make_rows, measure

PROMPTS = [
    Prompt("copy", "repeat", "a = 1\nb = 2\na = 1\nb = 2\na ="),
    Prompt("main", "fresh", "def main(argv):\n"),
    Prompt("import", "fresh", "import os\n", is_chat=True),
]
ROWS = ("transformers:prompt_lookup", "prompt_lookup")
SETTINGS = BenchSettings(max_new_tokens=8)


def tiny_llama(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """A Llama whose greedy text depends on the tokens before it."""
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()


@pytest.fixture(scope="session")
def loaded(tokenizer: Any) -> LoadedModel:
    model = hf_specdec.enable(tiny_llama(len(tokenizer)))
    return LoadedModel(model=model, tokenizer=tokenizer, name="tiny")


def records_of(loaded: LoadedModel, settings: BenchSettings = SETTINGS, **kwargs: Any) -> Records:
    """Records of a run of one timed round."""
    records = Records(make_header(loaded, settings))
    rows, prompts = kwargs.pop("rows", ROWS), kwargs.pop("prompts", PROMPTS)
    measure(loaded, prompts, make_rows(rows, loaded), settings, records, **{"rounds": 1, **kwargs})
    return records


@pytest.fixture(scope="session")
def measured(loaded: LoadedModel) -> Records:
    """A whole run of two timed rounds; not to be changed."""
    return records_of(loaded, rounds=2)
