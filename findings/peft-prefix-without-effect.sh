#!/usr/bin/env bash
# PEFT prefix and prompt tuning lose their effect in generate.   peft 0.21.2, transformers 5.24.0, torch 2.13.0
#
# Expected: generate writes what repeated forwards write, as PEFT's guides of both methods show, and with transformers 5.23.0 it does.
# Seen: with PrefixTuningConfig generate writes the base model's text, token for token. PEFT hands the prefix over as past_key_values,
#   transformers 5.24 has renamed the argument to cache, fills it with an empty one and ignores the other with a FutureWarning.
#   With PromptTuningConfig the virtual tokens are put before the first forward and before every later one: PEFT looks for the
#   cache under the old name and takes each step for the first.
# Who meets it: everyone who upgrades transformers under a trained prefix or soft prompt; evaluations then measure the base model.
#   pip installs the pair without complaint.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile transformers==5.24.0 peft==0.21.2

HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import copy

import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
base = LlamaForCausalLM(config).eval()
prompt, new_tokens = torch.arange(3, 11)[None], 12


def randomise(module, size):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=size)


def generated(model):
    text = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )
    return text[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def by_forwards(model):
    text = prompt
    for _ in range(new_tokens):
        logits = model(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    return text[0, prompt.shape[1] :].tolist()


def tuned(config_class):
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(base), config_class(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    randomise(model.prompt_encoder, 3.0)
    return model


randomise(base, 0.2)
plain = generated(base)
print("base model, generate     ", plain)
prefix = tuned(PrefixTuningConfig)
prefix_forwards, prefix_generated = by_forwards(prefix), generated(prefix)
print("prefix tuning, forwards  ", prefix_forwards)
print("prefix tuning, generate  ", prefix_generated)
soft = tuned(PromptTuningConfig)
soft_forwards, read = by_forwards(soft), []
soft.base_model.model.register_forward_pre_hook(
    lambda module, args, inputs: read.append(next(inputs[name] for name in ("inputs_embeds", "input_ids") if inputs.get(name) is not None).shape[1]),
    with_kwargs=True,
)
soft_generated = generated(soft)
print("prompt tuning, forwards  ", soft_forwards)
print("prompt tuning, generate  ", soft_generated)
print("tokens read by each of its forwards", read, "where a prompt of 8, 4 virtual tokens and single tokens are to be read")
if prefix_forwards == plain or prefix_generated != plain:
    raise SystemExit("changed: prefix tuning has an effect in generate")
if soft_generated == soft_forwards or read == [12] + [1] * (new_tokens - 1):
    raise SystemExit("changed: prompt tuning is applied once in generate")
END
