"""Tiny random models, one line a family: what the matrix and the promise tests run on.

The weights are large enough that greedy text varies and depends on the tokens before it; `test_zoo.py` holds that.
Windows are shorter than the prompts, so that sliding layers slide. Nothing is downloaded.

    model = build(FAMILIES["llama"])
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers as tf

__all__ = ["FALLBACK", "FAMILIES", "QUICK", "VOCAB_SIZE", "WINDOW", "Family", "build"]
VOCAB_SIZE = 128
WINDOW = 16
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DECODER: dict[str, Any] = BASE | {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LOCAL: dict[str, Any] = {
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local", "global"], 1]],
    "window_size": WINDOW,
}
ALIBI: dict[str, Any] = {name: value for name, value in BASE.items() if name != "max_position_embeddings"}
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LIGHTNING: dict[str, Any] = EXPERTS | {
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "head_dim": 12,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": 3,
    "num_heads": 4,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: its name, its configuration and how far the engine is expected to speculate on it."""

    name: str
    config: str
    options: Mapping[str, Any]
    tier: str = "tree"
    scale: float = 0.15
    seed: int = 0

    @property
    def is_seq2seq(self) -> bool:
        """Whether it is an encoder-decoder."""
        return "num_attention_heads" not in self.options


def family(name: str, config: str, options: Mapping[str, Any], **fields: Any) -> tuple[str, Family]:
    return name, Family(name=name, config=config, options=options, **fields)


FAMILIES: dict[str, Family] = dict(
    (
        family("llama", "LlamaConfig", DECODER, seed=2),
        family("qwen3", "Qwen3Config", DECODER | {"head_dim": 12}, scale=0.18, seed=2),
        family("gpt2", "GPT2Config", BASE, scale=0.18, seed=3),
        family("opt", "OPTConfig", BASE | {"ffn_dim": 64, "word_embed_proj_dim": 48}, scale=0.22, seed=3),
        family("mistral", "MistralConfig", DECODER | {"sliding_window": WINDOW}, seed=7),
        family("gemma3", "Gemma3TextConfig", DECODER | MIXED | {"head_dim": 12}, seed=4),
        family("phi3", "Phi3Config", DECODER, seed=7),
        family("gpt_oss", "GptOssConfig", DECODER | MIXED | EXPERTS | {"head_dim": 12}, scale=0.12, seed=7),
        family("mixtral", "MixtralConfig", DECODER | EXPERTS),
        family("deepseek_v3", "DeepseekV3Config", DECODER | LATENT, scale=0.12, seed=1),
        family("bloom", "BloomConfig", BASE, tier="chain", scale=0.22, seed=5),
        family("falcon", "FalconConfig", ALIBI | {"alibi": True}, tier="chain", scale=0.18, seed=1),
        family("mpt", "MptConfig", ALIBI | {"max_seq_len": 512, "use_cache": True}, tier="chain", scale=0.18, seed=5),
        family(
            "gpt_neo",
            "GPTNeoConfig",
            BASE | LOCAL | {"max_position_embeddings": 2048},
            tier="chain",
            scale=0.12,
            seed=4,
        ),
        family("lfm2", "Lfm2Config", DECODER | CONVOLUTIONS, tier="tree", scale=0.12, seed=6),
        family("qwen3_next", "Qwen3NextConfig", DECODER | RECURRENT, tier="tree", scale=0.06, seed=1),
        family("minimax", "MiniMaxConfig", DECODER | LIGHTNING, tier="chain", scale=0.12, seed=3),
        family("t5", "T5Config", T5, tier="chain", scale=0.18, seed=2),
        family("bart", "BartConfig", SEQ2SEQ, tier="chain", scale=0.1, seed=6),
    )
)

# A plain decoder, positions in a table, a sliding window, position biases, a recurrent state, an encoder.
QUICK = ("llama", "opt", "gemma3", "bloom", "qwen3_next", "t5")
FALLBACK: dict[str, Family] = dict(
    (
        family(
            "recurrent_gemma", "RecurrentGemmaConfig", DECODER | {"lru_width": 48}, tier="plain", scale=0.12, seed=7
        ),
        family("m2m_100", "M2M100Config", SEQ2SEQ | {"pad_token_id": 127}, tier="plain", scale=0.1, seed=7),
    )
)


def build(family: Family) -> Any:
    """The family's model: fp32, eval mode, the same weights each time; generation never ends by itself."""
    auto = tf.AutoModelForSeq2SeqLM if family.is_seq2seq else tf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(family.seed)
        model = auto.from_config(getattr(tf, family.config)(**family.options)).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=family.scale)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)  # biases, norms and sinks take part too
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
