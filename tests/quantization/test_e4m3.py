"""FP8 numbers: widening is exact on every code, and quantised rows lie within the format's rounding."""

import pytest
import torch

from hf_specdec.kernels.quantization.e4m3 import CODES, SHIFT_FACTOR, has_subnormals, quantize_rows, shifted, widen

ALL = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(CODES)
FINITE = ALL[ALL.to(torch.float32).isfinite()]


def test_every_finite_code_is_widened_exactly() -> None:
    """All 254, the sign of zero included; torch's own conversion is the reference."""
    assert len(FINITE) == 254
    expected = FINITE.to(torch.float32)
    assert torch.equal(widen(FINITE).to(torch.float32), expected)
    assert torch.equal(widen(FINITE).signbit(), expected.signbit())


@pytest.mark.parametrize("length", [252, 253, 254])
def test_four_at_once_and_one_by_one_agree(length: int) -> None:
    """Bits that cross from one number of a lane to the next are masked."""
    codes = FINITE[:length].clone()
    assert torch.equal(widen(codes).to(torch.float32), codes.to(torch.float32))


def test_moved_bits_are_the_value_but_for_a_power_of_two() -> None:
    normal = FINITE[FINITE.to(torch.float32).abs() >= 2**-6]
    assert torch.equal(shifted(normal).to(torch.float64) * SHIFT_FACTOR, normal.to(torch.float64))


def test_subnormal_codes_are_found() -> None:
    for code in FINITE:
        value = abs(float(code.to(torch.float32)))
        assert has_subnormals(code[None]) == (0 < value < 2**-6), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantised_rows_are_within_half_a_step(dtype: torch.dtype) -> None:
    """Three bits of mantissa: 1/16 of the number, or what is lost by having no subnormal codes."""
    weight = torch.randn(64, 48).to(dtype)
    codes, scale = quantize_rows(weight)
    error = (codes.to(torch.float32) * scale - weight.to(torch.float32)).abs()
    size = weight.to(torch.float32).abs()
    assert (error <= torch.maximum(size / 16, size.amax(1, keepdim=True) * 2e-5) * 1.01).all()


def test_no_code_is_subnormal() -> None:
    """Numbers of every size down to nothing next to a large one."""
    weight = torch.cat([torch.ones(1), torch.logspace(-9, 0, 4000), -torch.logspace(-9, 0, 4000)])[None]
    codes, scale = quantize_rows(weight)
    assert not has_subnormals(codes)
    error = (codes.to(torch.float32) * scale - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, torch.tensor(2e-5)) * 1.01).all()
    assert (codes.to(torch.float32) == 0).any()


def test_scales_survive_bfloat16() -> None:
    """A loader that keeps scales in the model's dtype gets the same numbers."""
    _, scale = quantize_rows(torch.randn(100, 32))
    assert scale.dtype == torch.float32
    assert torch.equal(scale.to(torch.bfloat16).to(torch.float32), scale)


def test_rows_of_zeros_and_large_numbers() -> None:
    weight = torch.zeros(2, 8)
    weight[1] = torch.tensor([3e38, -3e38, 1e38, 0, 0, 0, 0, 0])
    codes, scale = quantize_rows(weight)
    assert torch.equal(codes[0].to(torch.float32), torch.zeros(8))
    assert scale.isfinite().all()
    assert torch.allclose(codes.to(torch.float32) * scale, weight, rtol=0.07)


def test_large_weights_are_made_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 8)
    expected = quantize_rows(weight)
    monkeypatch.setattr("hf_specdec.kernels.quantization.e4m3.AT_ONCE", 3 * 8)
    codes, scale = quantize_rows(weight)
    assert torch.equal(codes.view(torch.int8), expected[0].view(torch.int8))
    assert torch.equal(scale, expected[1])
