#!/usr/bin/env bash
# generate numbers the tokens of a RoBERTa decoder from 0, forward from padding_idx + 1.   transformers 5.24.0, torch 2.13.0
#
# Expected: greedy generate writes the likeliest tokens of forward. RoBERTa's position table begins behind its padding index, so the
#   first token has position 2; training, which calls forward without position_ids, uses 2, 3, 4 and so on.
# Seen: generate makes position_ids 0, 1, 2 for every decoder-only model and passes them on. RoBERTa, RoBERTa-PreLayerNorm, CamemBERT,
#   XLM-R, XLM-R-XL, X-MOD and Data2Vec take them as they are: every token is read two rows too early, the second at the
#   padding row. The text is another one, with a cache and without; no warning. Bert and Electra, which begin at 0, are right.
# Who meets it: RobertaForCausalLM and its relatives (is_decoder=True) after fine-tuning. Passing position_ids to generate, from
#   padding_idx + 1 on, gives forward's text.
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

transformers.logging.set_verbosity_error()
names = ["Roberta", "RobertaPreLayerNorm", "Camembert", "XLMRoberta", "XLMRobertaXL", "Data2VecText", "Electra"]
prompt = torch.arange(5, 20)[None]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
seen = {}
for name in names:
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    config = config_class(**sizes, pad_token_id=1, bos_token_id=0, eos_token_id=2, is_decoder=True, max_position_embeddings=64)
    model = model_class(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        model.get_output_embeddings().weight[1] = 0.0
        text = prompt
        for _ in range(12):
            logits = model(text, use_cache=False).logits[:, -1:]
            logits[..., 1] = -torch.inf  # the padding token would count as no token
            text = torch.cat([text, logits.argmax(-1)], dim=1)
    by_forwards = text[0, 15:].tolist()
    plain = model.generate(prompt, suppress_tokens=[1], **asked)[0, 15:].tolist()
    positions = torch.arange(2, 2 + prompt.shape[1])[None]
    told = model.generate(prompt, suppress_tokens=[1], position_ids=positions, **asked)[0, 15:].tolist()
    print(f"{name:20} forwards {by_forwards}\n{'':20} generate {plain}\n{'':20} with positions from 2 {told}")
    seen[name] = plain == by_forwards, told == by_forwards
if seen != {name: (False, True) for name in names[:-1]} | {"Electra": (True, False)}:
    raise SystemExit(f"changed: generate, and generate from position 2, equal to forward: {seen}")
END
