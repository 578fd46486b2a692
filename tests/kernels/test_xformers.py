"""What reaches xformers, by its own checks of the operators that a GPU would run, and what is refused before."""

from typing import Any
from unittest import mock

import pytest
import torch

from hf_specdec.kernels.xformers import attend, xformers_kernel
from tests.helpers.attention import StrictKernel
from tests.kernels.test_layout import DTYPES, HEADS, expected, tensors, tree_mask

pytest.importorskip("xformers")
OF_THIS_MACHINE = ("device=cpu", "bf16 is only supported", "operator wasn't built", "xFormers wasn't build")


class Asking(StrictKernel):
    """Asks xformers about everything that it computes."""

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> None:
        assert not reasons(query, key, value, bias)


def reasons(*tensors: Any) -> list[str]:
    """Why the CUTLASS operator would not take these on a GPU of compute capability 8 or 9."""
    from xformers.ops.fmha import common, cutlass

    inputs = common.Inputs(*tensors, scale=0.3)
    inputs.validate_inputs()
    step = 16 // tensors[0].dtype.itemsize
    with mock.patch.object(cutlass, "_minimum_gemm_alignment", lambda _: step):
        result = cutlass.FwOp.not_supported_reasons(inputs)
    return [reason for reason in result if not reason.startswith(OF_THIS_MACHINE)]


@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_xformers_takes_what_it_is_given(heads: str, dtype: str, queries: int) -> None:
    query, key, value = tensors(heads, dtype, queries=queries, keys=queries + 14)
    mask = tree_mask(2, queries, queries + 14, text=3)
    kernel = Asking()
    output = attend(kernel, query, key, value, mask, 0.3)
    torch.testing.assert_close(output.float(), expected(query, key, value, mask), atol=2e-2, rtol=2e-2)
    assert len(kernel.calls) == 1


def test_the_operators_are_called_as_xformers_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a torch of another CUDA version than the wheel's they are not refused."""
    from xformers.ops import fmha

    scales: list[float] = []

    def apply(inputs: Any, needs_gradient: bool) -> Any:
        scales.append(inputs.scale)
        scores = torch.einsum("bmhd,bkhd->bhmk", inputs.query, inputs.key) * inputs.scale + inputs.attn_bias
        return torch.einsum("bhmk,bkhd->bmhd", scores.softmax(-1), inputs.value), None

    monkeypatch.setattr(fmha.common, "_built_with_cuda", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fmha, "_dispatch_fw", lambda inputs, needs_gradient: mock.Mock(apply=apply))
    query, key, value = tensors("gqa", "fp32")
    mask = tree_mask(2, 5, 23, text=9)
    output = attend(xformers_kernel, query, key, value, mask, 0.3)
    torch.testing.assert_close(output, expected(query, key, value, mask), atol=1e-5, rtol=1e-5)
    assert fmha.common._built_with_cuda is True
    assert scales == [0.3]
