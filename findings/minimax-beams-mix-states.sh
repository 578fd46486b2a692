#!/usr/bin/env bash
# MiniMax's beam search continues each beam from another beam's state.   transformers 5.24.0, torch 2.13.0
#
# Expected: beam search with a cache returns what it returns with use_cache=False, and sequences_scores is the mean log-probability of
#   the returned text (length_penalty 1), as its documentation says. Keys, values and states are reordered with the beams.
# Seen: the cache of MiniMax keeps states of linear attention (7 layers of 8 in the released models) outside the layers that
#   reorder_cache reorders. So beams go on from states of texts that were dropped: another text, whose score is far from its
#   true log-probability. No error. Greedy decoding and sampling are right.
# Who meets it: MiniMax-Text-01 and M1 with num_beams > 1. Other hybrids (Jamba, Bamba, Qwen3-Next) reorder their states.
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
from transformers import MiniMaxConfig, MiniMaxForCausalLM

transformers.logging.set_verbosity_error()
config = MiniMaxConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    num_local_experts=2,
    num_experts_per_tok=1,
)
model = MiniMaxForCausalLM(config).eval()
torch.manual_seed(0)
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.3)
prompt = torch.arange(5, 25)[None]


@torch.no_grad()
def mean_log_probability(text):
    scores = model(text, use_cache=False).logits.log_softmax(-1)[0, prompt.shape[1] - 1 : -1]
    return float(scores.gather(-1, text[0, prompt.shape[1] :, None]).mean())


right = {}
for beams in (1, 4):
    for use_cache in (False, True):
        asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 12, "do_sample": False}
        found = model.generate(prompt, num_beams=beams, use_cache=use_cache, eos_token_id=None, pad_token_id=0, **asked)
        text, true = found.sequences, mean_log_probability(found.sequences)
        reported = float(found.sequences_scores) if beams > 1 else true
        print(f"{beams} beams, use_cache={use_cache}:", text[0, 20:].tolist(), f"score {reported:.3f}, true {true:.3f}")
        right[beams, use_cache] = abs(reported - true) < 1e-3, text.tolist()
if right[1, True] != right[1, False] or not right[4, False][0]:
    raise SystemExit("changed: what was right without beams or without a cache is not")
if right[4, True][0] or right[4, True] == right[4, False]:
    raise SystemExit("changed: beam search with a cache scores its text rightly")
END
