"""Matrix products of a few rows by Triton, run by its interpreter on the CPU: the same bits for any number of rows."""

import importlib
from typing import Any

import pytest
import torch

from tests.helpers.interpreter import interpreted, pass_in_another_process


def test_the_tests_below_pass_in_a_process_with_the_interpreter() -> None:
    pass_in_another_process(__file__)


@pytest.fixture(scope="module")
def products() -> Any:
    return importlib.import_module("hf_specdec.tools.bench.gpu_products")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@interpreted
@pytest.mark.parametrize(("num_out", "num_in"), [(70, 1088), (64, 128)])
def test_a_row_has_the_same_bits_beside_any_others(products: Any, num_out: int, num_in: int) -> None:
    """At the same place of its tile: the interpreter multiplies by NumPy, whose rows are not alike."""
    states, bias = torch.randn(64, num_in).half(), torch.randn(num_out).half()
    weight, other = (torch.randn(num_out, num_in).div(num_in**0.5).half() for _ in range(2))
    whole, whole_gated = products.linear(states, weight, bias), products.gated(states, weight, other)
    for first, rows in ((0, 1), (16, 2), (48, 3), (0, 7), (32, 16), (0, 17), (16, 33)):
        own = states[first : first + rows].contiguous()
        assert torch.equal(products.linear(own, weight, bias), whole[first : first + rows])
        assert torch.equal(products.gated(own, weight, other), whole_gated[first : first + rows])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_products_are_torchs_but_for_rounding(products: Any, dtype: torch.dtype, rows: int) -> None:
    states = torch.randn(rows, 1100).to(dtype)
    weight, other = (torch.randn(130, 1100).div(33.0).to(dtype) for _ in range(2))
    exact = torch.nn.functional.linear(states.double(), weight.double())
    gate = torch.nn.functional.silu(exact) * torch.nn.functional.linear(states.double(), other.double())
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    assert torch.allclose(products.linear(states, weight).double(), exact, **near)
    assert torch.allclose(products.gated(states, weight, other).double(), gate, **near)


@interpreted
def test_a_row_of_the_table_for_each_matrix_and_number_of_rows(products: Any) -> None:
    shape = products.Shape((64, 1))
    timed: list[torch.Size] = []

    def milliseconds(function: Any) -> float:
        timed.append(function().shape)
        return 0.5

    found = list(products.measure_products(shape, 1e9, torch.device("cpu"), rows=(1, 2), milliseconds=milliseconds))
    assert [(row["name"], row["rows"]) for row in found][:2] == [("attention's output", 1), ("attention's output", 2)]
    assert len(found) == 6
    assert timed[-1] == (2, 172)
    assert found[0]["torch_share"] == pytest.approx(64 * 64 * 2 / 0.5e-3 / 1e9)
