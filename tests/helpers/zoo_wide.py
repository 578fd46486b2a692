"""Tiny random models of every model type that generates: the library's own defaults, each size shrunk by its name.

Nothing is listed but what a recipe cannot know, in `zoo_wide_overrides.py`. Weights are large, so text varies.

    model_type, kind = "qwen3_next", "causal"
    model = varied(model_type, kind)
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.support import PROMPT

VOCAB_SIZE, POSITIONS, NEW_TOKENS = 128, 512, 24
VARIED = 8  # different tokens that make a text worth comparing
KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "image": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
}
AS_IT_IS = 1 << 30
SIZES = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r"type_vocab_size|index_n_heads|num_mel_bins|num_channels|in_channels|patch_size", AS_IT_IS),
        (r".*vocab_size(_per_layer_input|_base)?|.*codebook_size|.*_vocab", VOCAB_SIZE),
        (r".*(key_value_heads|kv_heads|kv_n_heads|query_groups|num_key_heads)", 2),
        (r".*(heads|n_head)(_per_layer)?", 4),
        (r".*(rope_head_dim|nope_head_dim|rotary_dim)|index_topk", 8),
        (r".*(head_dim|d_kv|kv_channels|d_head|headdim|attention_head_size)", 16),
        (r".*lora_rank", 32),
        (r".*(hidden_sizes?|d_model|n_embd|width|input_embedding_size|_dim)", 64),
        (r".*(intermediate_size(_mlp)?|ffn_dim|d_ff|n_inner|feed_forward_size|dim_ff|dff)", 64),
        (r".*(experts_per_tok(en)?|moe_k|moe_topk|moe_top_k)", 2),
        (r".*shared_experts|(mamba_)?n_?groups?|topk_group|first_k_dense_replace|num_expert_group", 1),
        (r".*experts", 4),
        (r".*(sliding_window(_size)?|attention_chunk_size|window_size|attention_window\w*)", 16),
        (r"mamba_d_state|ssm_state_size|state_size", 8),
    )
]
LENGTHS = re.compile(r"max_(\w+_)?positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|.*position_embeddings")
TOKENS = re.compile(r"(\w+_)?(token|start|end|bos|eos|pad|sep|cls|eoi|boi|boa|eoa|image|unk|mask|patch)\w*_(id|index)")
LAYERS = re.compile(r"(num_|n_)?(\w+_)?layers?|depth")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
NOT_MADE_AGAIN = ("transformers_version", "architectures", "model_type")


def all_models() -> list[tuple[str, str]]:
    """Every model class that generates: a model type and a kind each, the first that leads to it."""
    result: dict[str, tuple[str, str]] = {}
    for kind, mapping in KINDS.items():
        for config, model in mapping.items():
            result.setdefault(str(model), (config.model_type, kind))
    return list(result.values())


def kinds_of(model_type: str) -> list[str]:
    """The kinds of `all_models` for one model type; no class is loaded for them."""
    names = {kind: mapping._model_mapping.get(model_type) for kind, mapping in KINDS.items()}
    first = {str(name): kind for kind, name in reversed(names.items()) if name is not None}
    return [kind for kind in KINDS if kind in first.values()]


def shrunk(model_type: str) -> Any:
    """The type's default configuration with every size made small."""
    config_class = CONFIG_MAPPING[model_type]
    overrides = OVERRIDES.get(model_type, {})
    sizes = config_class(**overrides.get("__init__", {})).to_dict()
    for name in NOT_MADE_AGAIN:
        sizes.pop(name, None)
    rest = {name: value for name, value in overrides.items() if name != "__init__"}
    return config_class.from_dict(_shrunk(sizes, rest, []))


def _shrunk(sizes: dict[str, Any], overrides: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    small = {name: value for name, value in sizes.items() if name != "per_layer_config"}
    depth = next((sizes[name] for name in DEPTHS if isinstance(sizes.get(name), int)), 0)
    by_layer = {name: value for name, value in small.items() if isinstance(value, list) and len(value) == depth > 2}
    layers = _layers(list(by_layer.values())) if by_layer else [0, 1]
    for name, value in list(small.items()):
        if name in by_layer:
            small[name] = [value[layer] for layer in layers]
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            inner = overrides.get(name)
            small[name] = _shrunk(value, inner if isinstance(inner, dict) else {}, token_ids)
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[name] = len(layers) if name in DEPTHS and value == depth else _small(name, value, sizes, token_ids)
    changed = {name: value for name, value in overrides.items() if not isinstance(small.get(name), dict)}
    return small | changed | {name: value for name, value in overrides.items() if value is None}


def _small(name: Any, value: int, sizes: dict[str, Any], token_ids: list[int]) -> int:
    """One size; token ids beyond the vocabulary become different ones at its end."""
    if not isinstance(name, str):
        return value
    if TOKENS.fullmatch(name):
        if value < 100:
            return value
        token_ids.append(value)
        return VOCAB_SIZE - 1 - (len(set(token_ids)) - 1) % 28
    if LAYERS.fullmatch(name):
        return min(value, 2)
    if LENGTHS.fullmatch(name):
        return POSITIONS
    if name == "num_key_value_heads" and value == sizes.get("num_attention_heads"):
        return min(value, 4)
    if name == "head_dim" and value == sizes.get("qk_rope_head_dim"):
        return min(value, 8)
    return min(value, next((size for pattern, size in SIZES if pattern.fullmatch(name)), AS_IT_IS))


def _layers(lists: Sequence[list[Any]]) -> list[int]:
    """A few layers that cover every kind there is."""
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    firsts = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    if firsts[-1] < 4 or len(firsts) > 6:
        firsts = firsts[:4]
        return list(range(max(firsts[-1] + 1, 2)))
    return firsts if len(firsts) > 1 else [0, 1]


def build(config: Any, kind: str, scale: float) -> Any:
    """The model: fp32, eval mode, the same weights each time; generation never ends by itself."""
    model_class = KINDS[kind][type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    if model_class.config_class is not None and not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class._from_config(config).eval().float()
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.normal_(std=scale) if weight.ndim > 1 else weight.add_(torch.randn_like(weight), alpha=0.1)
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = settings.forced_bos_token_id = None
    settings.pad_token_id, settings.num_beams, settings.encoder_no_repeat_ngram_size = 0, 1, None
    padding = getattr(config, "pad_token_id", None)
    if padding and config.is_encoder_decoder:  # positions of these count padding tokens out, wherever they are
        settings.suppress_tokens = [padding]
    return model


@functools.lru_cache(maxsize=1)
def varied(model_type: str, kind: str) -> Any:
    """The type's model with weights that make its greedy text vary, as far as it can."""
    best: tuple[int, Any] = (-1, None)
    for scale in (0.15, 0.3, 0.08, 0.5):
        model = build(shrunk(model_type), kind, scale)
        text = model.__class__.generate(model, **inputs(model, rows=1), max_new_tokens=NEW_TOKENS, do_sample=False)
        different = len(set(text[0, -NEW_TOKENS:].tolist()))
        best = max(best, (different, model), key=lambda result: result[0])
        if different >= VARIED:
            break
    return best[1]


def inputs(model: Any, *, rows: int) -> dict[str, Any]:
    """A text prompt, or three of different lengths padded on the left; features for encoders of sound and images."""
    name = model.main_input_name
    if model.config.is_encoder_decoder and name != "input_ids":
        return {name: _features(model, name, rows)}
    if rows == 1:
        return {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    ids = PROMPT.repeat(rows, 1)
    for row, padding in enumerate((0, 7, 18)):
        ids[row, :padding] = 0
        ids[row, padding:] = PROMPT[0, padding:]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _features(model: Any, name: str, rows: int) -> torch.Tensor:
    """What an encoder of sound or images reads."""
    config = model.config
    parts = (getattr(config, part, None) for part in ("encoder", "encoder_config", "audio_config", "vision_config"))
    encoder = next((part for part in parts if part is not None), config)
    generator = torch.Generator().manual_seed(0)
    if name == "pixel_values":
        size = getattr(encoder, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        return torch.rand((rows, getattr(encoder, "num_channels", 3), height, width), generator=generator)
    if name == "flattened_patches":
        return torch.rand((rows, 9, encoder.patch_embed_hidden_size + 2), generator=generator)
    if name == "input_values":
        return torch.rand((rows, 4000), generator=generator)
    bins = getattr(encoder, "num_mel_bins", None) or getattr(encoder, "input_feat_per_channel", 80)
    if hasattr(config, "max_source_positions") and config.model_type == "whisper":
        return torch.rand((rows, bins, 2 * config.max_source_positions), generator=generator)
    return torch.rand((rows, 64, bins), generator=generator)


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
