"""Shapes of the embedded pair. Both are Llama-shaped, share one tokenizer and tie their embeddings."""

from transformers import LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 2048
SHAPES = {
    "target": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 688,
    },
    "draft": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 344,
    },
}


def new_model(name: str, *, vocab_size: int) -> LlamaForCausalLM:
    """A freshly initialised fp32 `"target"` (5.4M parameters) or `"draft"` (0.9M)."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)
