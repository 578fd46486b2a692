"""Weights of the embedded models in 8 bits a number, which the package ships, and the checkpoint that they become.

A matrix is int8 with one fp16 scale a row. Fewer levels than 127 take the same room here and less in a wheel, which
compresses them.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PACKED = "packed.safetensors"
WEIGHTS = "model.safetensors"
SCALE = ".scale"  # ends the name of a matrix's scales


def pack(weights: Path, packed: Path, levels: int) -> None:
    """Writes the matrices of a safetensors file as whole numbers from `-levels` to `levels`, the rest as it is."""
    tensors = {}
    for name, weight in load_file(weights).items():
        tensors[name] = weight
        if weight.ndim == 2 and weight.is_floating_point():
            largest = weight.float().abs().amax(dim=1, keepdim=True)
            scale = (largest / levels).clamp_min(torch.finfo(torch.float16).tiny).half()
            tensors[name] = (weight.float() / scale.float()).round().clamp(-levels, levels).to(torch.int8)
            tensors[name + SCALE] = scale
    save_file(tensors, packed)


def unpack(source: Path, target: Path) -> None:
    """Writes the checkpoint of a packed folder: its other files as they are, and its weights in bf16."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(PACKED))
    tensors = load_file(source / PACKED)
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, tensor in weights.items():
        if (scale := tensors.get(name + SCALE)) is not None:
            weights[name] = (tensor.float() * scale.float()).bfloat16()
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
