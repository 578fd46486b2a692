"""`NodeLogits` says the same whether its rows were read together before, or are looked at when asked."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.methods.common.node_logits import NodeLogits, read_logits
from tests.helpers.devices import emulate
from tests.helpers.operations import VIEWS

VOCAB, K = 40, 8


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [slice(None), slice(1, 4), [0, 3, 4]])
def test_what_was_read_is_what_is_looked_at(dtype: torch.dtype, which: slice | list[int]) -> None:
    logits = rows(dtype)
    for row, read in zip(logits, read_logits(logits, K), strict=True):
        before, now = NodeLogits(row, read), NodeLogits(row)
        assert before.best(which) == now.best(which) == row[which].argmax(-1).tolist()
        for count in (1, K):
            for part, expected in zip(before.top(count, which), now.top(count, which), strict=True):
                np.testing.assert_array_equal(part, expected)


def test_log_probabilities_are_the_softmaxs() -> None:
    (row, _) = rows()
    tokens, log_probs = NodeLogits(row).top(K)
    expected = row.log_softmax(-1).topk(K)
    assert tokens.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(log_probs, expected.values.numpy(), rtol=1e-5)


def test_log_probabilities_of_half_precision_are_fp32s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an accelerator computes, too: their sum is not rounded to half precision."""
    emulate(monkeypatch)
    row = 20.0 + rows(torch.bfloat16)[0]
    _, log_probs = NodeLogits(row).top(K)
    np.testing.assert_allclose(log_probs, row.float().log_softmax(-1).topk(K).values.numpy(), rtol=1e-5)


def test_of_equal_logits_the_first_is_best() -> None:
    """As `torch.argmax` says; in half precision equal logits are common."""
    row = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    row[1, 7:9] = row[2, -2:] = 1.0
    assert NodeLogits(row).best() == NodeLogits(row, read_logits(row, K)).best() == [0, 7, VOCAB - 2]


def test_a_small_vocabulary_has_fewer_best_tokens() -> None:
    (row, _) = rows()
    small = row[:, :3]
    for logits in (NodeLogits(small), NodeLogits(small, read_logits(small, K))):
        assert [part.shape for part in logits.top(K)] == [(5, 3), (5, 3)]


def test_more_than_was_read_is_read_again() -> None:
    (row, _) = rows()
    tokens, _ = NodeLogits(row, read_logits(row, 2)).top(K)
    assert tokens.tolist() == row.topk(K).indices.tolist()


def test_token_ids_are_exact() -> None:
    """The largest vocabularies have some 300,000 tokens; fp32 holds integers up to 16,777,216."""
    row = torch.zeros(1, 300_001)
    row[0, 300_000] = 1.0
    assert NodeLogits(row, read_logits(row, 1)).best() == [300_000]


class Operations(TorchDispatchMode):
    """The names of ATen's operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_device_is_asked_for_a_few_operations_and_one_transfer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Each is a launch there; what is not fp32 takes one more, since log probabilities are."""
    (row, _) = rows(dtype)
    expected = read_logits(row, K)
    emulate(monkeypatch)
    with Operations() as operations:
        read = read_logits(row, K)
    assert read.dtype == np.float32
    np.testing.assert_allclose(read[:, 1 + K :], expected[:, 1 + K :], atol=1e-5)
    launched = [name for name in operations.names if name not in VIEWS]
    assert len(launched) == (4 if dtype == torch.float32 else 5), launched
