#!/usr/bin/env bash
# A GGUF file that was widened to fp32 counts as quantised.   transformers 5.24.0, gguf 0.19.0, torch 2.13.0
#
# Expected: where packed weights cannot be used, transformers widens GGUF files to full precision, "for further training"
#   (its GGUF guide), and save_pretrained is the way to safetensors and back to GGUF.
# Seen: every parameter is fp32 and every layer a Linear, yet save_pretrained, half, float, dequantize and Trainer refuse the model as
#   quantised. So even for a file of F32 tensors alone. GgufConfig(dequantize=True) gives the same weights in a model that can all of
#   this. The same in transformers 5.23.0.
# Who meets it: conversion and fine-tuning scripts that follow the guide; architectures of the older loader (Llama,
#   Mistral, Qwen2, Phi3 and others) on any device.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0

HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
shapes = {"token_embd": (96, 64), "output": (96, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
shapes |= {f"blk.0.{name}": (64, 64) for name in square}


def write(file, packed):
    writer, random = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(96)
    for name, shape in shapes.items():
        weight = random.normal(0, 0.1, shape).astype(np.float32)
        if packed and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def attempt(action):
    try:
        action()
    except (ValueError, NotImplementedError):
        return False
    return True


for packed in (True, False):
    write("model.gguf", packed)
    weights = []
    for settings in ({}, {"quantization_config": GgufConfig(dequantize=True)}):
        model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", **settings)
        weights.append(model.state_dict())
        works = {
            "save": attempt(lambda: model.save_pretrained("saved")),
            "train": attempt(lambda: Trainer(model, TrainingArguments("out", use_cpu=True, report_to="none"))),
            "float": attempt(lambda: model.float()),
        }
        kinds = {str(parameter.dtype) for parameter in model.parameters()}
        print("Q8_0" if packed else "F32 ", "dequantize=True" if settings else "as it is       ", kinds, works)
        if set(works.values()) != {bool(settings)} or kinds != {"torch.float32"}:
            raise SystemExit("changed: what can be done with a model that was read from GGUF")
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
END
