"""bitsandbytes' layers in this package's own forwards on a CPU: a token has the same numbers beside any others.

LLM.int8() multiplies integers, whose sums are exact; but a column where any token of the forward has an outlier it
multiplies in 16 bits for all tokens. Here each token has its own outliers only, as if the layer computed it alone.
4-bit weights that bitsandbytes packs for the CPU are multiplied by its own kernel, which adds up every token alike;
others are widened in each forward and multiplied by the core.
"""

import sys
from typing import Any

import torch
from torch.nn.functional import pad

from hf_specdec.common.replaced import here
from hf_specdec.compat.modules import int_mm
from hf_specdec.kernels import cpu
from hf_specdec.kernels.linear import LANES, WIDTH, core_product, product
from hf_specdec.kernels.own_forward import OwnForward

TINY = 1e-30  # less than any fp16 number but 0


class BnbForward(OwnForward):
    """The forward of a layer of bitsandbytes that `can_replace` has named."""

    __slots__ = ()
    module: Any
    kind: str  # the name of the layer's class

    @classmethod
    def can_replace(cls, module: Any) -> bool:
        """Returns whether a token's numbers are its own in this layer, by what does not change while a call runs."""
        library: Any = sys.modules.get("bitsandbytes")
        is_kind = library is not None and type(module) is getattr(library.nn, cls.kind, None)
        return is_kind and not module.training and int(module.in_features) % LANES == 0

    def fits(self, states: torch.Tensor) -> bool:
        """True if this thread is in a block, and the states are of 16 bits."""
        return here.depth > 0 and type(states) is torch.Tensor and states.is_cpu and states.dtype in cpu.HALVES


class Int8Forward(BnbForward):
    """The forward of a `Linear8bitLt`."""

    __slots__ = ()
    kind = "Linear8bitLt"

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it for each token alone."""
        state: Any = self.module.state
        if not self.fits(input) or not input.numel() or state.CB is None or state.has_fp16_weights:
            return self.torchs(input)
        ops = torch.ops.bitsandbytes
        tokens = input.reshape(-1, input.shape[-1])  # (tokens, in)
        rounded = tokens.half()
        is_outlier = rounded.abs() >= (state.threshold or torch.inf)
        columns = is_outlier.any(dim=0).nonzero().view(-1)
        if len(columns):
            rounded = rounded.masked_fill(is_outlier, 0)
        largest = rounded.abs().amax(dim=1).float()
        codes = torch.round(rounded * (127.0 / largest.clamp(min=TINY))[:, None])
        bias = self.module.bias
        bias = None if bias is None else bias.to(input.dtype)
        sums = _integer_sums(codes, state.CB)
        out = ops.int8_mm_dequant(sums, largest, state.SCB, dtype=input.dtype, bias=bias)
        if len(columns):
            weights = ops.int8_vectorwise_dequant(state.CB[:, columns].contiguous(), state.SCB).to(input.dtype)
            values = tokens.masked_fill(~is_outlier, 0)[:, columns]
            out = (out.float() + _column_by_column(values.float(), weights.float())).to(input.dtype)
        result: torch.Tensor = out.view(*input.shape[:-1], -1)
        return result


class FourBitForward(BnbForward):
    """The forward of a `Linear4bit`."""

    __slots__ = ()
    kind = "Linear4bit"

    @classmethod
    def can_replace(cls, module: Any) -> bool:
        """Returns whether a token's numbers are its own in this layer, by what does not change while a call runs."""
        if not super().can_replace(module):
            return False
        return _is_packed(module) or getattr(module, "compute_dtype", None) in (None, *cpu.HALVES)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        state: Any = getattr(self.module.weight, "quant_state", None)
        if not self.fits(input) or state is None or _is_packed(self.module):
            return self.torchs(input)
        tokens = input.to(self.module.compute_dtype or input.dtype)
        weight = sys.modules["bitsandbytes"].functional.dequantize_4bit(self.module.weight.data, state)
        bias = self.module.bias
        bias = None if bias is None else bias.to(tokens.dtype)
        return product(tokens, weight.to(tokens.dtype), bias).to(input.dtype)


def _is_packed(module: Any) -> bool:
    """Returns whether bitsandbytes packs the weight for the CPU, at the latest in the layer's first forward."""
    return bool(getattr(module, "support_avx512bf16_for_cpu", False))


def _integer_sums(codes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`codes @ weights.T` of int8 numbers, `(tokens, in)` of them in fp32 and `(out, in)`: in int32."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return int_mm(codes.to(torch.int8), weights.t())  # number by number on other CPUs
    return core_product(codes, weights.float()).int()


def _column_by_column(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`values @ weights.T`, `(tokens, columns)` and `(out, columns)`, column by column: zeros add nothing."""
    num_out, num_columns = weights.shape
    padding = (0, -num_columns % LANES)
    rows = pad(weights, (*padding, 0, -num_out % WIDTH)).t().contiguous()  # (columns, out)
    return core_product(pad(values, padding), rows, is_transposed=True)[:, :num_out]
