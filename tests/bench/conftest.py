"""A loaded that is built in a moment: a tiny random Llama with the embedded tokenizer."""

import copy
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.run import Bench

ROWS = ("transformers:prompt_lookup", "plain", "prompt_lookup")
PROMPTS = [
    Prompt("copy", "repeat", ("a = 1\nb = 2\na = 1\nb = 2\na =",)),
    Prompt("new", "fresh", ("def main(argv):\n",)),
    Prompt("talk", "fresh", ("import os\n", "import sys\n"), is_chat=True),
]
SETTINGS = BenchSettings(max_new_tokens=8, rounds=2)


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


@pytest.fixture(scope="session")
def measured(loaded: LoadedModel) -> dict[str, Any]:
    """The document of a whole run; take a copy to change it."""
    return Bench([loaded], PROMPTS, SETTINGS, rows=ROWS).run()


@pytest.fixture(scope="session")
def entry(measured: dict[str, Any]) -> dict[str, Any]:
    """The one model's entry in it."""
    (only,) = measured["models"]
    return cast("dict[str, Any]", only)


@pytest.fixture
def document(measured: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(measured)
