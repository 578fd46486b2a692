"""Layers with torchao's FP8 weights: this package's forward computes what their numbers say, for every width."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from hf_specdec.kernels.quantization import layers
from hf_specdec.kernels.quantization.layers import SHIFT_FACTOR, shifted

ALL = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
FINITE = ALL[ALL.to(torch.float32).isfinite()]


@pytest.mark.parametrize("length", [252, 253, 254])
def test_moved_bits_are_the_value_but_for_a_power_of_two(length: int) -> None:
    """Four at once and one by one; torch's own conversion is the reference, the sign of zero included."""
    codes = FINITE[:length].clone()
    expected = codes.to(torch.float32)
    assert torch.equal(shifted(codes).double() * SHIFT_FACTOR, expected.double())
    assert torch.equal(shifted(codes).signbit(), expected.signbit())


@pytest.mark.parametrize("piece", [3 * 32, 1 << 19])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_its_weight_says_for_every_width(
    monkeypatch: pytest.MonkeyPatch, bias: bool, piece: int
) -> None:
    """In pieces or whole; a token has the same bits beside any others."""
    monkeypatch.setattr(layers, "PIECE", piece)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=bias)).to(torch.bfloat16).eval()
    quantize_(model, Float8WeightOnlyConfig())
    weight, x = model[0].weight, torch.randn(1, 20, 32).to(torch.bfloat16)
    exact = F.linear(x.double(), weight.qdata.to(torch.float32).double() * weight.scale.double())
    exact = exact if model[0].bias is None else exact + model[0].bias.double()
    with torch.no_grad(), FewTokenLayers(model):
        together = model(x)
        alone = torch.cat([model(token) for token in x.split(1, dim=1)], dim=1)
    assert (together.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
    assert torch.equal(alone, together)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(x), model(x)), "outside a block the layer is torchao's"
