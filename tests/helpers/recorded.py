"""Tiny models whose forwards are recorded at once, and their texts."""

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_specdec
from hf_specdec.forward.recorded import forwards

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma() -> Gemma3ForCausalLM:
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds))


def qwen3_moe() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.2)
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=512, n_embd=64, n_layer=2, n_head=4, eos_token_id=None)
    )


MODELS = {
    "llama": llama,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gemma3": gemma,
    "qwen3_moe": qwen3_moe,
    "gpt2": gpt2,
}


def model_of(name: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model: Any = MODELS[name]().to(dtype).eval()
    model.generation_config.eos_token_id = None
    return hf_specdec.enable(model)


def generated(model: Any, method: str = "plain", ids: torch.Tensor = PROMPT, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True} | kwargs
    return model.generate(ids, attention_mask=ids.ne(0).long(), spec_method=method, **options)


def unrecorded(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The same by the model's own code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "LEAST_FORWARDS", 1 << 30)
        return generated(model, *args, **kwargs)
