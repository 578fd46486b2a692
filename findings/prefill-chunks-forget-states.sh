#!/usr/bin/env bash
# A prompt read in chunks loses the recurrent state of the chunks before.   transformers 5.24.0, torch 2.13.0
#
# Expected: prefill_chunk_size changes memory and speed, never the text; the cache carries states from one chunk to the next.
#   Mamba's recurrence is exact however its input is cut (arXiv 2312.00752), and transformers' Bamba shows it.
# Seen: Jamba's state layers start from an empty state whenever a forward reads more than one token, so the text is that of a
#   prompt that lost its beginning there. Mamba and FalconMamba do the same in forward, with a cache and several tokens.
#   No error and no warning.
# Who meets it: long prompts under little memory; chat loops that hand the cache back with a new turn of several tokens; speculative
#   decoding, which verifies several tokens behind a cache.
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
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

transformers.logging.set_verbosity_error()
common = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
heads = common | {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
jamba = JambaConfig(**heads, attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False)
bamba = BambaConfig(**heads, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
models = {
    "Jamba": JambaForCausalLM(jamba),
    "Bamba": BambaForCausalLM(bamba),
    "Mamba": MambaForCausalLM(MambaConfig(**common)),
    "FalconMamba": FalconMambaForCausalLM(FalconMambaConfig(**common)),
}
prompt = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(0))
same = {}
for name, model in models.items():
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    if name in ("Jamba", "Bamba"):
        asked = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        whole = model.generate(prompt, **asked)[0, 24:].tolist()
        chunks = model.generate(prompt, prefill_chunk_size=8, **asked)[0, 24:].tolist()
        print(f"{name:11} whole prompt {whole}, chunks of 8 {chunks}")
        same[name] = whole == chunks
        continue
    with torch.no_grad():
        whole = model(prompt, use_cache=True).logits
        first = model(prompt[:, :12], use_cache=True)
        at_once = model(prompt[:, 12:], cache=first.cache).logits
        cache, singly = model(prompt[:, :12], use_cache=True).cache, []
        for token in prompt[0, 12:]:
            singly.append(model(token.view(1, 1), cache=cache).logits)
    errors = [float((logits - whole[:, 12:]).abs().max() / whole.abs().max()) for logits in (torch.cat(singly, 1), at_once)]
    print(f"{name:11} logits behind a cache of 12 tokens, error of 12 forwards of one token {errors[0]:.0e}, of one of 12 {errors[1]:.0e}")
    assert errors[0] < 1e-3
    same[name] = errors[1] < 1e-3
if same != {"Jamba": False, "Bamba": True, "Mamba": False, "FalconMamba": False}:
    raise SystemExit(f"changed: kept states are {same}")
END
