"""bitsandbytes' 4-bit layers in this package's own forwards on a CPU: a token has the same numbers beside any others.

Weights that bitsandbytes packs for the CPU are multiplied by its own kernel, which adds up every token alike; others
are widened in each forward and multiplied by the core.
"""

import sys
from typing import Any

import torch

from hf_specdec.common.replaced import here
from hf_specdec.kernels import cpu
from hf_specdec.kernels.linear import LANES, product
from hf_specdec.kernels.own_forward import OwnForward


class FourBitForward(OwnForward):
    """The forward of a `Linear4bit` that `can_replace` has named."""

    __slots__ = ()
    module: Any

    @staticmethod
    def can_replace(module: Any) -> bool:
        """Returns whether a token's numbers are its own in this layer, by what does not change while a call runs."""
        library: Any = sys.modules.get("bitsandbytes")
        if library is None or type(module) is not library.nn.Linear4bit or module.training:
            return False
        computes_halves = getattr(module, "compute_dtype", None) in (None, *cpu.HALVES)
        return int(module.in_features) % LANES == 0 and (_is_packed(module) or computes_halves)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        state: Any = getattr(self.module.weight, "quant_state", None)
        is_half = type(input) is torch.Tensor and input.is_cpu and input.dtype in cpu.HALVES
        if not here.depth or not is_half or state is None or _is_packed(self.module):
            return self.torchs(input)
        tokens = input.to(self.module.compute_dtype or input.dtype)
        weight = sys.modules["bitsandbytes"].functional.dequantize_4bit(self.module.weight.data, state)
        bias = self.module.bias
        bias = None if bias is None else bias.to(tokens.dtype)
        return product(tokens, weight.to(tokens.dtype), bias).to(input.dtype)


def _is_packed(module: Any) -> bool:
    """Returns whether bitsandbytes packs the weight for the CPU, at the latest in the layer's first forward."""
    return bool(getattr(module, "support_avx512bf16_for_cpu", False))
