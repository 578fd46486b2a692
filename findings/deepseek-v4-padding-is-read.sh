#!/usr/bin/env bash
# DeepSeek-V4 reads the padding of a batch.   transformers 5.24.0, torch 2.13.0
#
# Expected: attention_mask hides padding, so a row of a batch that is padded on the left, which generate asks of decoder-only models, has the
#   logits of the same text alone (DeepSeek-V3 does, to rounding).
# Seen: a single padding token changes logits by as much as the largest. Compressed attention sums up keys and values in blocks of 4
#   columns (128 in other layers): padding shifts the blocks' borders, and its own columns are summed up too. No warning.
#   Padding on the right changes nothing.
# Who meets it: batches of prompts of different lengths: evaluations, RL, generate with several rows. A prompt's answer depends on the
#   length of its neighbours; batches of equal lengths, or prompts one by one, are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile transformers==5.24.0

HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM

transformers.logging.set_verbosity_error()
common = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
common |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 32, "pad_token_id": 0}
v3 = DeepseekV3Config(
    **common,
    intermediate_size=64,
    num_hidden_layers=2,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
v4 = DeepseekV4Config(
    **common,
    num_hidden_layers=2,
    num_key_value_heads=1,
    head_dim=16,
    o_lora_rank=32,
    o_groups=2,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=8,
    sliding_window=16,
    layer_types=["compressed_sparse_attention", "compressed_sparse_attention"],
    mlp_layer_types=["moe", "moe"],
)
text = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(0))
errors = {}
for name, model in {"V3": DeepseekV3ForCausalLM(v3), "V4": DeepseekV4ForCausalLM(v4)}.items():
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
        alone = model(text, use_cache=False).logits
        for side, count in (("right", 6), ("left", 1), ("left", 4), ("left", 6)):
            padding = torch.zeros((1, count), dtype=torch.long)
            parts = [padding, text] if side == "left" else [text, padding]
            mask = torch.cat([torch.ones_like(part) if part is text else torch.zeros_like(part) for part in parts], dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(torch.cat(parts, dim=1), attention_mask=mask, position_ids=positions, use_cache=False).logits
            logits = logits[:, count:] if side == "left" else logits[:, :-count]
            errors[name, side, count] = float((logits - alone).abs().max() / alone.abs().max())
            print(f"DeepSeek-{name}, {count} padding tokens on the {side}: largest difference {errors[name, side, count]:.0e} of the largest logit")
for (name, side, _), error in errors.items():
    if (error > 0.05) != (name == "V4" and side == "left") or 1e-3 < error < 0.05:
        raise SystemExit(f"changed: padding on the {side} of DeepSeek-{name} moves logits by {error:.0e}")
END
