"""The FP8 layer computes what its widened weight would, keeps its codes through casts, and copies."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_specdec.kernels.quantization import fp8_linear
from hf_specdec.kernels.quantization.e4m3 import CODES, has_subnormals, quantize_rows
from hf_specdec.kernels.quantization.fp8_linear import Fp8Linear, multiplies_fp8, scaled_linear, widened_linear

HAS_CPU_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
ON_CPU = pytest.mark.skipif(not HAS_CPU_KERNEL, reason="this torch multiplies FP8 by row on GPUs alone, as the package")
SHAPES = [(48, 32), (33, 31), (128, 64)]


def layer_of(out_size: int, in_size: int, *, bias: bool = True) -> Fp8Linear:
    layer = Fp8Linear(in_size, out_size, bias=bias, dtype=torch.bfloat16)
    layer.weight.data, layer.weight_scale.data = quantize_rows(torch.randn(out_size, in_size) / in_size**0.5)
    if layer.bias is not None:
        layer.bias.data = torch.randn(out_size).to(torch.bfloat16)
    return layer


def exact(layer: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
    """In float64, by torch's own conversion of the codes."""
    weight = layer.weight.to(torch.float32).double() * layer.weight_scale.double()
    y = F.linear(x.double(), weight)
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
@pytest.mark.parametrize(("shape", "bias"), list(itertools.product(SHAPES, [True, False])), ids=str)
def test_it_computes_what_its_weight_says(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """In pieces or whole, for inputs of every dtype; the result has the input's dtype."""
    layer = layer_of(*shape, bias=bias)
    x = torch.randn(2, 5, shape[1]).to(dtype)
    expected = exact(layer, x)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(40, 32)
    x = torch.randn(1, 32).to(torch.bfloat16)
    whole = layer(x)
    monkeypatch.setattr(fp8_linear, "PIECE", 3 * 32)
    assert torch.allclose(layer(x).float(), whole.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("code", [0x01, 0x87, 0x08, 0x00])
def test_weights_are_multiplied_as_moved_bits_only_without_subnormal_codes(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Whether or not this machine's hardware takes subnormal numbers for zero."""
    seen: list[bool] = []
    real = widened_linear
    monkeypatch.setattr(
        fp8_linear, "widened_linear", lambda *args, **kw: seen.append(kw["only_normal"]) or real(*args, **kw)
    )
    layer = layer_of(16, 8)
    layer.weight.data.view(torch.uint8)[3, 5] = code
    layer(torch.ones(1, 8, dtype=torch.bfloat16))
    assert seen == [code in (0x08, 0x00)]


def test_a_foreign_weight_with_subnormal_codes_is_exact_too() -> None:
    """Hardware that takes subnormal bfloat16 for zero must not see them."""
    layer = Fp8Linear(7, 2, bias=False, dtype=torch.bfloat16)
    codes = torch.arange(1, 8, dtype=torch.uint8).view(CODES)
    layer.weight.data = torch.stack([codes, codes])
    layer.weight_scale.data = torch.tensor([[1.0], [512.0]])
    assert has_subnormals(layer.weight)
    y = layer(torch.eye(7, dtype=torch.bfloat16))
    assert torch.equal(y.float(), exact(layer, torch.eye(7)).float())
    assert (y != 0).all()


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_inputs_of_extreme_size_do_not_vanish_or_overflow(size: float) -> None:
    layer = layer_of(16, 16, bias=False)
    x = (torch.randn(3, 16) * size).to(torch.bfloat16)
    expected = exact(layer, x)
    assert (layer(x).double() - expected).abs().max() <= 2e-2 * expected.abs().max()


@ON_CPU
def test_fp8_multiplication_by_row_computes_the_same_up_to_its_rounding() -> None:
    """The call that a GPU gets; later than 2.10 torch computes it on CPUs too. Tokens have scales of their own."""
    layer = layer_of(48, 32)
    x = torch.randn(2, 3, 32) * torch.tensor([1e-3, 1.0, 1e3])[None, :, None]
    expected = exact(layer, x)
    y = scaled_linear(x.to(torch.bfloat16), layer.weight, layer.weight_scale, layer.bias)
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, 3, 48))
    error = (y.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert (error <= 0.06).all()
    alone = scaled_linear(x[:, :1].to(torch.bfloat16), layer.weight, layer.weight_scale, layer.bias)
    assert torch.equal(alone, y[:, :1]), "a token's result does not depend on its neighbours"


@ON_CPU
def test_a_token_of_zeros_is_no_division_by_zero() -> None:
    layer = layer_of(32, 16)
    y = scaled_linear(torch.zeros(2, 16, dtype=torch.bfloat16), layer.weight, layer.weight_scale, layer.bias)
    assert layer.bias is not None
    assert torch.equal(y, layer.bias.expand(2, -1))


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_fp8_multiplication_needs_compute_capability_8_9(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fp8_linear, "_capability", lambda device: capability)
    assert multiplies_fp8(torch.device("cuda:0")) == expected
    assert not multiplies_fp8(torch.device("cpu"))


def test_the_backend_is_chosen_by_device_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FP8 is multiplied, sizes that are no multiples of 16 still go by widened weights."""
    called = []
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8_linear, "scaled_linear", lambda *args: called.append("scaled") or widened_linear(*args))
    monkeypatch.setattr(
        fp8_linear, "widened_linear", lambda *args, **kw: called.append("widened") or widened_linear(*args, **kw)
    )
    for shape in ((48, 32), (48, 40), (50, 32)):
        layer_of(*shape)(torch.randn(1, shape[1]).to(torch.bfloat16))
    assert called == ["scaled", "widened", "widened"]


def casts(layer: Fp8Linear) -> list[Any]:
    return [layer.to(torch.float16), layer.float(), layer.double(), layer.half(), layer.to("cpu", torch.bfloat16)]


def test_casts_leave_codes_and_scales() -> None:
    layer = layer_of(16, 8)
    codes, scale = layer.weight.clone(), layer.weight_scale.clone()
    for cast in casts(layer):
        assert (cast.weight.dtype, cast.weight_scale.dtype) == (CODES, torch.float32)
        assert torch.equal(cast.weight.view(torch.int8), codes.view(torch.int8))
        assert torch.equal(cast.weight_scale, scale)
    assert layer.to("meta").weight.device.type == "meta"


def test_it_copies_and_pickles() -> None:
    layer = layer_of(16, 8)
    x = torch.randn(2, 8).to(torch.bfloat16)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), layer(x))


def test_a_loaded_state_is_looked_at_anew() -> None:
    """Whether codes are subnormal belongs to the weight, not to the layer."""
    layer = layer_of(4, 8, bias=False)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    layer(x)
    state = {"weight": torch.ones(4, 8, dtype=torch.uint8).view(CODES), "weight_scale": torch.ones(4, 1)}
    layer.load_state_dict(state)
    assert torch.equal(layer(x).float(), torch.full((1, 4), 8 * 2.0**-9))


def test_it_runs_compiled_as_one_graph() -> None:
    """Its operations are torch's own, so a compiler may fuse them; here only the capture is tried."""
    layer = layer_of(16, 8)
    x = torch.randn(1, 8).to(torch.bfloat16)
    expected = layer(x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
