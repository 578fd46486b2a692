"""FP8 numbers (float8_e4m3fn): rows of a weight to codes and scales, and codes to bfloat16 by moving bits.

e4m3 has a sign, four bits of exponent and three of mantissa; bfloat16 has a sign, eight and seven. Moved four bits to
the left with the sign kept in front, a code is the bfloat16 number 2^-120 times its value. Knows nothing about modules.
"""

import torch

CODES = torch.float8_e4m3fn
MAX_CODE = 448.0  # the largest finite e4m3 number
SHIFT_FACTOR = 2.0**120  # value of a code over the bfloat16 number that its moved bits spell
# Sign, four bits of exponent and three of mantissa of a moved code, in one and in four 16-bit numbers.
MASK_16 = -30736
MASK_64 = int.from_bytes(MASK_16.to_bytes(2, "little", signed=True) * 4, "little", signed=True)
AT_ONCE = 1 << 18  # weights quantised at once: their fp32 copies stay in a core's cache


@torch.no_grad()
def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one scale a row, by the row's largest number.

    Scales are rounded to bfloat16, so that they survive any loader's dtype. No code is subnormal: what would be is
    rounded to zero or to the smallest normal number, at most 2e-5 of the row's largest, and in return the codes can
    be widened without a multiplication.

    Args:
        weight (`torch.Tensor`): (out, in), any floating dtype.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: codes (out, in) in float8_e4m3fn, scales (out, 1) in float32.
    """
    codes = torch.empty(weight.shape, dtype=CODES, device=weight.device)
    scale = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    at_once = max(AT_ONCE // max(weight.shape[1], 1), 1)
    for start in range(0, weight.shape[0], at_once):
        rows = weight[start : start + at_once].to(torch.float32, copy=True)
        largest = rows.abs().amax(dim=1, keepdim=True)
        by = (largest / MAX_CODE).to(torch.bfloat16).to(torch.float32)
        by = torch.where(by > 0, by, torch.ones_like(by))
        rows = rows.div_(by).clamp_(-MAX_CODE, MAX_CODE)
        codes[start : start + at_once] = _without_subnormals(rows.to(CODES))
        scale[start : start + at_once] = by
    return codes, scale


def _without_subnormals(codes: torch.Tensor) -> torch.Tensor:
    """Codes without an exponent (mantissa 1 to 7) as zero or, from 4 on, as the smallest normal one (8)."""
    bits = codes.view(torch.int8)
    size = bits & 0x7F
    change = ((size + 4) & 8) - size
    return (bits + change * (size < 8)).view(CODES)


def shifted(codes: torch.Tensor) -> torch.Tensor:
    """Contiguous codes as bfloat16 numbers that are 2^-120 times their values; subnormal codes become subnormal."""
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


def widen(codes: torch.Tensor) -> torch.Tensor:
    """Contiguous codes as bfloat16 numbers of the same value; exact for all 254 finite ones."""
    return shifted(codes).mul_(SHIFT_FACTOR)


def has_subnormals(codes: torch.Tensor) -> bool:
    """True if a code other than zero has no exponent, and is lost where hardware takes subnormal numbers for zero."""
    bits = codes.view(torch.int8)
    return bool((((bits & 0x78) == 0) & ((bits & 0x07) != 0)).any())
