"""Linear layers with weights in 4 bits or FP8 in this package's own forwards on a CPU: a token has the same numbers
beside any others.

Weights that bitsandbytes packs for the CPU are multiplied by its own kernel, which adds up every token alike; others
are widened in each forward and multiplied by the core.

torchao's FP8 weights are widened to bfloat16 a piece at a time by moving their bits: torch's conversion takes ten times
as long. float8_e4m3fn has a sign, four bits of exponent and three of mantissa; bfloat16 has a sign, eight and seven.
Moved four bits to the left with the sign kept in front, a code is the bfloat16 number 2^-120 times its value; inputs
and scales take up that factor. Codes without an exponent, below a 28,000th of a row's largest, become subnormal
numbers, which some instructions take for zero.
"""

import sys
from typing import Any

import torch

from hf_specdec.common.replaced import this_thread
from hf_specdec.kernels import cpu
from hf_specdec.kernels.layers import FORWARDS, LANES, OwnForward, product
from hf_specdec.kernels.quantization.weights import FP8_KIND

SHIFT_FACTOR = 2.0**120  # value of a code over the bfloat16 number that its moved bits spell
INPUT_FACTOR = 2.0**60  # of inputs, so that no product is subnormal; the rest goes to the scales
# Sign, four bits of exponent and three of mantissa of a moved code, in one and in four 16-bit numbers.
MASK_16 = -30736
MASK_64 = int.from_bytes(MASK_16.to_bytes(2, "little", signed=True) * 4, "little", signed=True)
PIECE = 1 << 19  # weights widened at once: the bfloat16 piece stays in a core's cache until it is multiplied


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
        if not this_thread.depth or not is_half or state is None or _is_packed(self.module):
            return self.torchs(input)
        tokens = input.to(self.module.compute_dtype or input.dtype)
        weight = sys.modules["bitsandbytes"].functional.dequantize_4bit(self.module.weight.data, state)
        bias = self.module.bias
        bias = None if bias is None else bias.to(tokens.dtype)
        return product(tokens, weight.to(tokens.dtype), bias).to(input.dtype)


def _is_packed(module: Any) -> bool:
    """Returns whether bitsandbytes packs the weight for the CPU, at the latest in the layer's first forward."""
    return bool(getattr(module, "support_avx512bf16_for_cpu", False))


class Fp8Forward(OwnForward):
    """The forward of a linear layer that `can_replace` has named."""

    __slots__ = ()
    module: Any

    @staticmethod
    def can_replace(module: Any) -> bool:
        """Returns whether the core can compute this layer, by what does not change while a call runs."""
        if type(module) is not torch.nn.Linear or type(module).forward is not FORWARDS[torch.nn.Linear]:
            return False
        weight: Any = module.weight
        is_fp8 = type(weight).__name__ == FP8_KIND and weight.qdata.dtype == torch.float8_e4m3fn
        return is_fp8 and weight.act_quant_kwargs is None and module.in_features % LANES == 0

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it, in bfloat16."""
        weight = self.module.weight
        is_plain = type(input) is torch.Tensor and input.is_cpu and input.dtype == torch.bfloat16
        if not this_thread.depth or not is_plain or not input.numel() or not weight.qdata.is_cpu:
            return self.torchs(input)
        return widened_product(input, weight.qdata, weight.scale, self.module.bias)


def zero_rows(model: torch.nn.Module) -> None:
    """Make zeros of the NaN that torchao 0.18 makes of a row of zeros."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == FP8_KIND:
            codes = weight.qdata.view(torch.int8)
            codes.masked_fill_((codes & 0x7F) == 0x7F, 0)


def widened_product(
    tokens: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`tokens @ (codes * scale).T + bias` in bfloat16.

    Args:
        tokens: `(..., in)`; codes: `(out, in)` in float8_e4m3fn; scale: `(out, 1)` in float32.
    """
    rows = max(PIECE // codes.shape[1], 1)
    if tokens.numel() > rows * codes.shape[1]:
        rows = codes.shape[0]  # more input than weights in a piece: nothing is gained by pieces
    states = tokens * INPUT_FACTOR
    sums = torch.cat([product(states, shifted(piece)) for piece in torch.split(codes, rows)], dim=-1)
    sums = sums * (scale.view(-1) * (SHIFT_FACTOR / INPUT_FACTOR))  # (..., out) in float32
    return (sums if bias is None else sums + bias).to(tokens.dtype)


def shifted(codes: torch.Tensor) -> torch.Tensor:
    """Contiguous codes as bfloat16 numbers that are 2^-120 times their values."""
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.numel() % 4 == 0:
        # Four numbers at once: what crosses from one to the next is masked.
        lanes = bits.view(-1).view(torch.int64)
        lanes <<= 4
        lanes &= MASK_64
    else:
        bits <<= 4
        bits &= MASK_16
    return bits.view(torch.bfloat16)
