"""Attention by Triton in the order of the text, by its interpreter: what a query sees decides every bit."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import hf_specdec
from hf_specdec.engine import static_shapes
from hf_specdec.kernels import key_order
from tests.helpers.graphs import counting, on_cpu
from tests.helpers.interpreter import interpreted, pass_in_another_process
from tests.helpers.support import PROMPT
from tests.helpers.text_order import SHAPES, TREES, attend, check_model, check_nodes
from tests.kernels.families import family_model

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_the_tests_below_pass_in_a_process_with_the_interpreter() -> None:
    pass_in_another_process(__file__)


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The module, with products whose elements depend on their row and column alone, as those of a GPU do."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(self: Any, first: Any, second: Any, added: Any, *_: Any) -> Any:
        total = np.zeros(added.data.shape, dtype=np.float32)
        for left, right in zip(numbers(first).T, numbers(second), strict=True):  # NumPy's own rows are not alike
            total += left[:, None] * right
        return interpreter.TensorHandle(total + added.data, added.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield importlib.import_module("hf_specdec.kernels.text_order")


def numbers(handle: Any) -> Any:
    """A tile in fp32; the interpreter keeps the bits of bfloat16."""
    is_bits = handle.data.dtype == np.uint16
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bits else handle.data.astype(np.float32)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_node_has_the_bits_of_its_token_alone(kernels: Any, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_nodes(kernels, dtype, shape)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_torchs_but_for_rounding(kernels: Any, dtype: torch.dtype) -> None:
    """Of any mask; a query that sees nothing gets zeros."""
    at = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 9, 20, generator=at).to(dtype)
    key, value = (torch.randn(2, 2, 600, dim, generator=at).to(dtype) for dim in (20, 40))
    mask = torch.rand(2, 1, 9, 600, generator=at) > 0.6
    mask[:, :, :, :100], mask[0, 0, 4], mask[1, 0, 8, 300:] = True, False, False
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    exact[0, 4] = 0.0
    found = attend(kernels, query, key, value, mask).double()
    assert torch.allclose(found, exact, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@interpreted
def test_queries_of_one_branch_share_their_keys(kernels: Any) -> None:
    mask = torch.zeros(1, 1, 5, 9, dtype=torch.bool)
    mask[..., :3] = True
    for node, others in enumerate([(3,), (3, 4), (3, 5), (3, 5, 6)]):
        mask[0, 0, node, list(others)] = True
    mask[0, 0, 4] = False
    order = kernels.key_order(mask)[0, 0]
    assert order[3, :6].tolist() == [0, 1, 2, 3, 5, 6]
    counts, leaders, common, longest = order[:, 9:].T.tolist()
    assert counts == [4, 5, 5, 6, 0]
    assert leaders[:4] == [3, 1, 3, 3]
    assert common == [4] * 5 and longest == [3] * 5


@interpreted
@pytest.mark.parametrize(("family", "do_sample"), [("mistral_wide", True), ("gemma3_wide", False)])
def test_logits_of_trees_are_those_of_single_tokens(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, family: str, do_sample: bool
) -> None:
    """Whole models with sliding windows; the CPU counts as a device with Triton."""
    monkeypatch.setattr(key_order, "DEVICES", ("cpu",))
    monkeypatch.setattr(static_shapes, "ORDERED_WIDTH", 7)
    model = hf_specdec.enable(family_model(family, torch.float16), plain_kernels=True)
    options = {"max_new_tokens": 16, "do_sample": do_sample, "temperature": 0.3}
    static = {"cache_implementation": "static", "compile_config": on_cpu(counting([]))}
    check_model(model, PROMPT, options | static, TREES)
