"""What the wide zoo's recipe cannot know: sizes that must fit one another, and fields without a usable default.

OVERRIDES["bamba"]      # fields of the shrunk configuration; under "__init__" those of the one it starts from
"""

from typing import Any

__all__ = ["OVERRIDES"]

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
INDEX = {"index_n_heads": 32, "index_head_dim": 16}  # fewer heads would select among equal scores
START = {"decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {"is_decoder": True}
HEADS = {"head_dim": 16}
MROPE = {"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}}
CROSS = {"is_decoder": True, "add_cross_attention": True}
BOTH_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
COMPRESSED = {
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
DECODERS = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer xlm-roberta xlm-roberta-xl"
)

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(DECODERS.split(), DECODER),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"), START),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), INDEX),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm46v", "glm4v", "glm_ocr"), MROPE),
    "mpt": {"use_cache": True},
    "evolla": {"use_cache": True},
    **dict.fromkeys(("encoder-decoder", "vision-encoder-decoder"), START | {"decoder": CROSS}),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), MROPE | {"vision_start_token_id": 100}),
    "bamba": MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "big_bird": DECODER | {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass": {"text_config": BOTH_ROPES},
    "cohere_compass_text": BOTH_ROPES,
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "dots1": HEADS | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_vl_moe": MROPE,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "gpt_bigcode": {"n_positions": 2048},  # a table of masks ends batches of trees 512 tokens before it
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "glm5_next": {"text_config": INDEX | {"index_topk": 16, "index_kpool": 4}},
    "granitemoehybrid": MAMBA | {"layer_types": MIXED, "num_hidden_layers": 3},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 12},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {"text_config": HEADS},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "ministral": HEADS,
    "mistral_large4": {"text_config": INDEX},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 32},
    "pix2struct": {"text_config": {"use_cache": True}},
    "qwen4_exp": {"text_config": COMPRESSED},
    "qwen4_exp_text": COMPRESSED,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": DECODER
    | {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "xlstm": {"num_heads": 4, "embedding_dim": 64, "num_blocks": 2, "qk_dim_factor": 1.0},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid"]
        + ["linear_attention"],
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": 4,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
