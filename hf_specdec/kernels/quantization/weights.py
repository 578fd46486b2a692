"""Facts of a loaded model's weights: its precision, how many numbers it has, and their bytes."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_specdec.kernels.packed import Q8_0, Packed

INT8_KIND, FOUR_BIT_KIND = "Linear8bitLt", "Linear4bit"  # of bitsandbytes, which need not be installed
FP8_KIND = "Float8Tensor"  # of torchao
GGUF_ROWS = {  # transformers' modules whose weights stay packed, and the attribute that is the length of a row
    ("GgufLinear", "weight"): "in_features",
    ("GgufEmbedding", "weight"): "embedding_dim",
    ("GgufExperts", "gate_up_proj"): "hidden_dim",
    ("GgufExperts", "down_proj"): "intermediate_dim",
}


def precision_of(model: nn.Module) -> str:
    """`"fp8"`, `"int8"` or `"nf4"` where linear layers are, the format of most packed weights, such as `"Q4_K"`, or the
    dtype, such as `"bfloat16"`.
    """
    packed = Counter[str]()
    for module in model.modules():
        if isinstance(module, Packed):
            packed["int8" if module.kind == Q8_0 else module.kind.name] += module.weight.numel()
    if packed:
        return packed.most_common(1)[0][0]
    for module in model.modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if type(weight).__name__ == FP8_KIND:
            return "fp8"
        if kind == INT8_KIND:
            return "int8"
        if kind == FOUR_BIT_KIND:
            return str(getattr(getattr(weight, "quant_state", None), "quant_type", "nf4"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def num_parameters(model: nn.Module) -> int:
    """Numbers in a model's parameters, those of packed ones counted, scales not."""
    return sum(_numel(owner, name, weight) for owner, name, weight in _parameters(model))


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters; scales count where they are a part of the parameter."""
    return sum(tensor.numel() * tensor.element_size() for *_, weight in _parameters(model) for tensor in _parts(weight))


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Every parameter once, with the module that has it and its name there."""
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield module, name, weight


def _numel(owner: nn.Module, name: str, weight: torch.Tensor) -> int:
    if isinstance(owner, Packed) and name == "weight":
        return owner.num_rows * owner.num_columns
    if (row := GGUF_ROWS.get((type(owner).__name__, name))) is not None:
        return weight.shape[:-1].numel() * int(getattr(owner, row))
    state = getattr(weight, "quant_state", None) if type(owner).__name__ == FOUR_BIT_KIND else None
    return int(torch.Size(state.shape).numel()) if state is not None else weight.numel()


def _parts(weight: Any) -> list[torch.Tensor]:
    """The tensors that a parameter consists of."""
    return [weight.qdata, weight.scale] if type(weight).__name__ == FP8_KIND else [weight]
