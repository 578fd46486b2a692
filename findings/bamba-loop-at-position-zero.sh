#!/usr/bin/env bash
# A decoding loop over Bamba restarts positions at every call.   transformers 5.24.0, torch 2.13.0
#
# Expected: model(next_tokens, cache=cache) continues the text, as the cache guide's loop shows: position_ids are optional and follow the
#   cache's length. Falcon-H1, Granite-4 hybrids and Jamba do so, and all other decoders tried that have rotary positions.
# Seen: Bamba numbers the new tokens from 0 whatever the cache holds, so attention layers rotate them to the text's beginning:
#   logits are off by a tenth and more, without a warning. generate passes position_ids and is right.
# Who meets it: loops of one's own (constrained decoding, scoring continuations after a shared prefix, speculative decoding) with Bamba-9B
#   and its descendants. Passing position_ids is the remedy.
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
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM

transformers.logging.set_verbosity_error()
common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
common |= {"num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
models = {
    "Falcon-H1": FalconH1ForCausalLM(FalconH1Config(**common, mamba_d_ssm=128)),
    "Bamba": BambaForCausalLM(BambaConfig(**common, attn_layer_indices=[1])),
}
text = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
errors = {}
for name, model in models.items():
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
        whole = model(text, use_cache=False).logits[:, 20:]
        for told in (False, True):
            cache, rest = model(text[:, :20], use_cache=True).cache, []
            for place in range(20, 40):
                positions = {"position_ids": torch.tensor([[place]])} if told else {}
                rest.append(model(text[:, place : place + 1], cache=cache, **positions).logits)
            errors[name, told] = float((torch.cat(rest, dim=1) - whole).abs().max() / whole.abs().max())
            print(f"{name:9} position_ids {'passed' if told else 'left out'}: error of the loop's logits {errors[name, told]:.0e}")
wrong = {call for call, error in errors.items() if error > 0.01}
if wrong != {("Bamba", False)}:
    raise SystemExit(f"changed: loops with wrong logits are {sorted(wrong)}")
END
