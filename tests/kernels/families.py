"""The zoo's families and some more whose attention is of another kind, and a way to try an implementation on one.

with implementation(family_model("gemma2"), "strict"):
    ...
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

import hf_specdec
from tests.helpers.attention import strict_attention
from tests.helpers.zoo import BASE, DECODER, EXPERTS, FAMILIES, MIXED, SEQ2SEQ, Family, build

__all__ = ["OFFERED", "REFUSED", "STRICT", "UNKNOWN", "WITHOUT_KERNEL", "family_model", "implementation", "padded"]
WIDE = {"hidden_size": 64, "head_dim": 16}  # heads that half precision takes too
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE = {
    "llama_mha": ("LlamaConfig", DECODER | WIDE | {"num_key_value_heads": 4}),
    "llama_mqa": ("LlamaConfig", DECODER | WIDE | {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", DECODER | {"hidden_size": 64}),
    "gemma2": ("Gemma2Config", DECODER | MIXED | WIDE | {"attn_logit_softcapping": 5.0}),
    "gemma2_uncapped": ("Gemma2Config", DECODER | MIXED | WIDE | {"attn_logit_softcapping": None}),
    "qwen3_moe": ("Qwen3MoeConfig", DECODER | WIDE | QWEN_EXPERTS),
    "mistral_wide": ("MistralConfig", DECODER | WIDE | {"sliding_window": 16}),
    "gemma3_wide": ("Gemma3TextConfig", DECODER | MIXED | WIDE),
    "mixtral_wide": ("MixtralConfig", DECODER | WIDE | EXPERTS),
}
REFUSED = {
    "bloom": ("BloomConfig", BASE),
    "falcon": ("FalconConfig", BASE),
    "gpt_neo": ("GPTNeoConfig", dict(FAMILIES["gpt_neo"].options)),
    "mpt": ("MptConfig", dict(FAMILIES["mpt"].options)),
    "bigbird_pegasus": ("BigBirdPegasusConfig", SEQ2SEQ | {"attention_type": "original_full"}),
}
ALL = FAMILIES | {
    name: Family(name=name, config=config, options=options) for name, (config, options) in (MORE | REFUSED).items()
}
UNKNOWN = ("gemma2", "gpt_oss")  # soft-capping and sinks, which are the model's own function's
OFFERED = [name for name in ALL if name not in (*REFUSED, *UNKNOWN)]
WITHOUT_KERNEL = ("t5",)  # biases of each layer's own are torch's
STRICT = "strict"


@functools.cache
def family_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """One model a family for all tests here, enabled."""
    family = ALL[name]
    model = build(dataclasses.replace(family, options=dict(family.options)))
    return hf_specdec.enable(model.to(dtype))


@contextlib.contextmanager
def implementation(model: Any, name: str) -> Iterator[Any]:
    """The model with another attention, and afterwards with its own again."""
    if name == STRICT:
        strict_attention(name).kernel.calls.clear()
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def padded(prompt: torch.Tensor, *, rows: int = 3) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    ids = prompt.repeat(rows, 1)
    for row in range(rows):
        ids[row, : 6 * row] = 0
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 6 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}
