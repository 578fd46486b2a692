"""Faults of bitsandbytes on CPUs in 4 bits: avoided where a model is loaded, refused where it cannot be."""

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.compat import loading as compat
from hf_specdec.errors import UnsupportedModelError

BLOCK = 64  # numbers that share a scale in nf4
CPU_BLOCK = 32  # rows that its packed layout for AVX-512 puts together


def layers_to_leave(model: PreTrainedModel) -> list[str] | None:
    """Layers that nf4 has to leave in full precision on a CPU; `None` where transformers' choice will do."""
    if reads_split_blocks():
        return None
    split = [name for name, module in model.named_modules() if _splits_blocks(module)]
    return [*compat.get_keys_to_not_convert(model), *split] if split else None


def reads_split_blocks() -> bool:
    """Returns whether bitsandbytes gives back, on this CPU, a 4-bit weight whose blocks of 64 go on from row to row.

    bitsandbytes 0.50.2 does not where it has AVX-512 code: the blocks' scales go to the wrong numbers.
    """
    import bitsandbytes

    functional = bitsandbytes.functional
    weight = torch.arange(1, 2 * 96 + 1, dtype=torch.float32).view(2, 96)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    result = functional.dequantize_4bit(codes, state)
    # As rows of one block each the same codes are read rightly everywhere.
    state.shape = torch.Size((3, BLOCK))
    return bool(torch.equal(result.view(-1), functional.dequantize_4bit(codes, state).view(-1)))


def _splits_blocks(module: nn.Module) -> bool:
    if type(module) is compat.Conv1D:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        return weight.shape[0] % BLOCK != 0
    return type(module) is nn.Linear and module.in_features % BLOCK != 0


def prepare(model: PreTrainedModel) -> None:
    """Make a model with 4-bit layers safe on CPUs.

    On CPUs with AVX-512-BF16, bitsandbytes packs a weight in place at its first forward. It raises for shapes that do
    not fill the packed blocks, so those layers take its general way; and a state dict made afterwards is wrong, and
    makes the model wrong too, so it is refused.

    Raises:
        UnsupportedModelError: the checkpoint has 4-bit layers that bitsandbytes reads wrongly on this CPU.
    """
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return
    for layer in [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]:
        split = int(layer.in_features) % getattr(layer.weight.quant_state, "blocksize", BLOCK) != 0
        if split and layer.weight.device.type == "cpu" and not reads_split_blocks():
            raise UnsupportedModelError(
                f"bitsandbytes {bitsandbytes.__version__} reads 4-bit rows of {layer.in_features} numbers wrongly on "
                "this CPU. Load the checkpoint on a GPU, or take one in full precision and load it with "
                'precision="nf4", which leaves such layers as they are.'
            )
        if layer.out_features % CPU_BLOCK or split:
            layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_pre_hook(refuse_packed)


def refuse_packed(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook before a 4-bit layer's state dict.

    Raises:
        UnsupportedModelError: the layer's weight was packed for the CPU.
    """
    state = getattr(module.weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        name = prefix.removesuffix(".") or type(module).__name__
        raise UnsupportedModelError(
            f"The nf4 weight of {name} was packed for this CPU by its first forward, and "
            "bitsandbytes does not unpack it rightly. Save the model right after loading it, before it "
            "generates: load it again and call save_pretrained first."
        )
