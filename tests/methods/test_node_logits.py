"""`NodeLogits` says the same whether its rows were read together before, or are looked at when asked."""

import numpy as np
import pytest
import torch

from hf_specdec.methods.node_logits import NodeLogits, read_logits

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
            for known, expected in zip(before.top(count, which), now.top(count, which), strict=True):
                np.testing.assert_array_equal(known, expected)


def test_log_probabilities_are_the_softmaxs() -> None:
    (row, _) = rows()
    tokens, log_probs = NodeLogits(row).top(K)
    expected = row.log_softmax(-1).topk(K)
    assert tokens.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(log_probs, expected.values.numpy(), rtol=1e-5)


def test_of_equal_logits_the_first_is_best() -> None:
    """As `torch.argmax` says; in half precision equal logits are common."""
    row = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    row[1, 7:9] = row[2, -2:] = 1.0
    assert NodeLogits(row).best() == NodeLogits(row, read_logits(row, K)).best() == [0, 7, VOCAB - 2]


def test_a_small_vocabulary_has_fewer_best_tokens() -> None:
    (row, _) = rows()
    small = row[:, :3]
    for logits in (NodeLogits(small), NodeLogits(small, read_logits(small, K))):
        assert [found.shape for found in logits.top(K)] == [(5, 3), (5, 3)]


def test_more_than_was_read_is_read_again() -> None:
    (row, _) = rows()
    tokens, _ = NodeLogits(row, read_logits(row, 2)).top(K)
    assert tokens.tolist() == row.topk(K).indices.tolist()


def test_token_ids_are_exact() -> None:
    """The largest vocabularies have some 300,000 tokens; fp32 holds integers up to 16,777,216."""
    row = torch.zeros(1, 300_001)
    row[0, 300_000] = 1.0
    assert NodeLogits(row, read_logits(row, 1)).best() == [300_000]
