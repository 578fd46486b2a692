"""Linear layers of a few tokens: the kernel computes what torch does."""

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_specdec.kernels import cpu, layers
from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from tests.kernels.layer_cases import has_core, inside, layer, tokens, transposed, writes_plains_text

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
pytestmark = has_core


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_torchs_but_for_its_rounding(
    dtype: torch.dtype, has_bias: bool, threads: int, products: list[int]
) -> None:
    """Of all remainders of tokens, outputs and lanes, against fp64."""
    for (num_in, num_out), count in itertools.product(((256, 131), (1288, 97), (40, 1000)), (1, 2, 3, 4, 5, 8, 31, 64)):
        module, inputs = layer(num_in, num_out, dtype, bias=has_bias), tokens(count, num_in, dtype=dtype)
        exact = F.linear(inputs.double(), module.weight.double(), module.bias.double() if has_bias else None)
        result = inside(module, inputs)
        assert result.dtype == dtype and result.shape == (count, num_out)
        torch.testing.assert_close(result.double(), exact, atol=ROUNDING[dtype] * 2, rtol=ROUNDING[dtype])
        assert products.pop() == count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transposed_product_is_torchs_but_for_its_rounding(
    dtype: torch.dtype, threads: int, products: list[int]
) -> None:
    """GPT-2's layers, whose weights are `(inputs, outputs)`."""
    for (num_in, num_out), count in itertools.product(
        ((256, 144), (1288, 528), (40, 1040)), (1, 2, 3, 4, 5, 8, 31, 64)
    ):
        module, inputs = transposed(num_in, num_out, dtype), tokens(2, count, num_in, dtype=dtype)
        exact = inputs.double() @ module.weight.double() + module.bias.double()
        result = inside(module, inputs)
        assert result.dtype == dtype and result.shape == (2, count, num_out)
        torch.testing.assert_close(result.double(), exact, atol=ROUNDING[dtype] * 2, rtol=ROUNDING[dtype])
        assert products.pop() == 2 * count


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_computed_alike_whatever_stands_beside_it(
    dtype: torch.dtype, is_transposed: bool, products: list[int]
) -> None:
    module = transposed(dtype=dtype) if is_transposed else layer(dtype=dtype)
    inputs = tokens(9, 256, dtype=dtype)
    together = inside(module, inputs)
    for place, alone in enumerate(inputs):
        assert torch.equal(inside(module, alone[None])[0], together[place])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_prompt_is_computed_in_pieces_as_each_token_would_be_alone(
    dtype: torch.dtype, is_transposed: bool, monkeypatch: pytest.MonkeyPatch, products: list[int]
) -> None:
    monkeypatch.setattr(layers, "MOST_TOKENS", 3000)
    module = transposed(dtype=dtype) if is_transposed else layer(dtype=dtype)
    inputs = tokens(1, 2050, 256, dtype=dtype)
    together = inside(module, inputs)
    assert products == [1024, 1024, 2]
    for place in (0, 1023, 1024, 2047, 2048, 2049):
        assert torch.equal(inside(module, inputs[:, place]), together[:, place])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_what_is_no_number_stay_so(dtype: torch.dtype, products: list[int]) -> None:
    module, inputs = layer(dtype=dtype, bias=False), tokens(3, 256, dtype=dtype)
    inputs[0, 5], inputs[1, 7] = float("nan"), float("inf")
    result, expected = inside(module, inputs), F.linear(inputs.float(), module.weight.float())
    assert result[0].isnan().all()
    assert torch.equal(result[1].float(), expected[1])
    assert result[2].isfinite().all()


@pytest.mark.parametrize(("is_transposed", "count"), [(False, 1), (False, 2), (True, 1), (False, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_core_computes_any_number_of_tokens_in_halves(
    dtype: torch.dtype, is_transposed: bool, count: int, products: list[int]
) -> None:
    inside((transposed() if is_transposed else layer()).to(dtype), tokens(count, 256).to(dtype))
    assert products == [count]


def test_any_shape_and_layout_of_tokens(products: list[int]) -> None:
    module = layer()
    for inputs in (tokens(2, 3, 256), tokens(256), tokens(2, 9, 256)[:, ::3], tokens(256, 5).T, tokens(0, 256)):
        torch.testing.assert_close(inside(module, inputs), module(inputs))
    assert products == [6, 1, 6, 5]


@pytest.mark.parametrize("count", [1, 2, layers.MOST_TOKENS, layers.MOST_TOKENS + 1, 300])
def test_torch_computes_many_tokens_in_fp32(count: int, products: list[int]) -> None:
    inside(layer(), tokens(count, 256))
    assert products == [count] * (count <= layers.MOST_TOKENS)


class Without(ModuleType):
    """A core on another processor."""

    @staticmethod
    def has_kernels() -> bool:
        return False


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("core", None, "no compiled core is installed"),
        ("core", Without("core"), "the processor has no AVX2"),
        ("team", lambda: 0, "torch's threads are not libgomp's"),
    ],
)
def test_where_the_core_cannot_compute_torch_does_and_the_reason_is_told(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu.why_unused() is None
        monkeypatch.setattr(cpu, name, value)
        assert cpu.why_unused() == reason
        assert FewTokenLayers(layer()).forwards == []
        torch.testing.assert_close(inside(layer(), tokens(3, 256)), layer()(tokens(3, 256)))
    finally:
        torch.set_num_threads(before)


def test_threads_that_come_later_and_are_unknown_are_torchs(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "team", lambda: 0)
    module = layer(1024, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    block = FewTokenLayers(module)
    torch.set_num_threads(2)
    try:
        with torch.no_grad(), block:
            module(tokens(3, 1024))
    finally:
        torch.set_num_threads(before)
    assert block.forwards and products == []


def test_the_threads_are_those_of_torchs_openmp_library() -> None:
    ours, other = f"{Path(torch.__file__).parent}/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"
    assert cpu._openmp({"[heap]", "/usr/lib/libc.so.6", ours, other}) == ours
    assert cpu._openmp({"/usr/lib/libc.so.6", "/env/lib/libiomp5.so"}) == "/env/lib/libiomp5.so"
    assert cpu._openmp({other, "/env/lib/libiomp5.so"}) is None
    assert cpu._openmp({"[stack]"}) is None


def test_the_core_refuses_what_it_cannot_multiply() -> None:
    inputs, weight = tokens(2, 256), layer().weight
    place = inputs.data_ptr(), weight.data_ptr(), 0, torch.empty(2, 131).data_ptr()
    for sizes in (
        (2, 131, 255, 0, False, 1, 0),
        (2, 131, 256, 3, False, 1, 0),
        (2, 131, 256, 0, True, 1, 0),
        (2, 131, 256, 0, False, 0, 0),
        (2, 131, 256, 0, False, 2, 0),
    ):
        with pytest.raises(ValueError, match="no product"):
            cpu.core.linear(*place, *sizes)


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", ["auto", "prompt_lookup", "lookahead", "draft_model", "eagle3", "plain"])
def test_every_method_writes_plains_text_with_the_cores_products(method: str, products: list[int]) -> None:
    writes_plains_text(method)
    assert products
