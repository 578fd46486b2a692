"""A linear layer with FP8 weights, on any device.

On GPUs that multiply FP8 numbers, activations are rounded to FP8 with one scale a token and multiplied row by row;
elsewhere the weights are widened to bfloat16 a piece at a time, and activations stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_specdec.kernels.linear import product
from hf_specdec.kernels.own_forward import here
from hf_specdec.kernels.quantization.e4m3 import CODES, MAX_CODE, SHIFT_FACTOR, has_subnormals, shifted, widen

MIN_CAPABILITY = (8, 9)  # of CUDA devices with FP8 matrix multiplication
PIECE = 1 << 19  # weights widened at once: the bfloat16 piece stays in a core's cache until it is multiplied
# Inputs are scaled up next to weights that are 2^-120 too small, so that no product is subnormal: 2^60 leaves as much
# room below as above.
INPUT_FACTOR = 2.0**60


def multiplies_fp8(device: torch.device) -> bool:
    """Returns whether a device multiplies FP8 matrices itself."""
    return device.type == "cuda" and torch.version.cuda is not None and _capability(device) >= MIN_CAPABILITY


class Fp8Linear(nn.Module):
    """A linear layer whose weight is FP8 codes with one scale a row.

    Casting the module to another dtype leaves codes and scales as they are.

    Args:
        dtype (`torch.dtype`): of the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        codes = torch.empty((out_features, in_features), dtype=CODES, device=device)
        scale = torch.empty((out_features, 1), dtype=torch.float32, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        own_bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if own_bias is None else nn.Parameter(own_bias, requires_grad=False)
        self.only_normal: bool | None = None  # whether no code is subnormal; looked up at the first forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out), in the dtype of `x`."""
        if multiplies_fp8(x.device) and _fits_scaled(self.weight):
            return scaled_linear(x, self.weight, self.weight_scale, self.bias)
        if self.only_normal is None:
            self.only_normal = not has_subnormals(self.weight)
        return widened_linear(x, self.weight, self.weight_scale, self.bias, only_normal=self.only_normal)

    def extra_repr(self) -> str:
        """As `nn.Linear`'s."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Fp8Linear":
        """Let moves act on codes and scales, and casts not: both pass `fn` as integers."""
        weight, scale = self.weight, self.weight_scale
        del self.weight, self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        codes = fn(weight.detach().view(torch.int8)).view(CODES)
        numbers = fn(scale.detach().view(torch.int32)).view(torch.float32)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(numbers, requires_grad=False)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.only_normal = None
        super()._load_from_state_dict(*args, **kwargs)


def widened_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    only_normal: bool = False,
) -> torch.Tensor:
    """`x @ (codes * scale).T + bias` with the codes widened to the dtype of `x`.

    Args:
        x (`torch.Tensor`): (..., in).
        codes (`torch.Tensor`): (out, in) in float8_e4m3fn.
        scale (`torch.Tensor`): (out, 1) in float32.
        only_normal: no code is subnormal. In bfloat16 the weights' missing factor then goes to `x` and `scale`.
    """
    moves_only = only_normal and x.dtype == torch.bfloat16
    by = scale.view(-1)
    if moves_only:
        x, by = x * INPUT_FACTOR, by * (SHIFT_FACTOR / INPUT_FACTOR)
    rows = max(PIECE // codes.shape[1], 1)
    if x.numel() > rows * codes.shape[1]:
        rows = codes.shape[0]  # more input than weights in a piece: nothing is gained by pieces
    is_torchs_own = moves_only and x.numel() == x.shape[-1] and not here.depth
    multiply = _one_token if is_torchs_own else product
    pieces = [
        multiply(x, shifted(piece) if moves_only else widen(piece).to(x.dtype)) for piece in torch.split(codes, rows)
    ]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
    y = y * by  # (..., out) in float32
    return (y if bias is None else y + bias).to(x.dtype)


def scaled_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same with the rows of `x` rounded to FP8 too, each by its largest number, multiplied in FP8.

    Args:
        x (`torch.Tensor`): (..., in), bfloat16 or another floating dtype; the product is bfloat16 in between.
        codes (`torch.Tensor`): (out, in) in float8_e4m3fn, both sizes multiples of 16.
        scale (`torch.Tensor`): (out, 1) in float32.
    """
    tokens = x.reshape(-1, x.shape[-1]).to(torch.float32)
    by = tokens.abs().amax(dim=1, keepdim=True) / MAX_CODE  # (tokens, 1)
    by = torch.where(by > 0, by, torch.ones_like(by))
    rounded = (tokens / by).clamp(-MAX_CODE, MAX_CODE).to(CODES)
    y = F.scaled_mm(
        rounded,
        codes.t(),
        by,
        F.ScalingType.RowWise,
        scale.t().contiguous(),
        F.ScalingType.RowWise,
        output_dtype=torch.bfloat16,
    )
    y = y.to(x.dtype)
    return (y if bias is None else y + bias.to(x.dtype)).reshape(*x.shape[:-1], codes.shape[0])


def _one_token(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `F.linear`; for one token a CPU multiplies by a vector a third faster."""
    return torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], weight.shape[0])


def _fits_scaled(codes: torch.Tensor) -> bool:
    """FP8 matrix multiplication wants sizes that are multiples of 16."""
    return codes.shape[0] % 16 == 0 and codes.shape[1] % 16 == 0


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
