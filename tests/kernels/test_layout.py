"""Folding and padding against torch's own attention, on random tensors."""

import pytest
import torch

from hf_specdec.kernels.core_attention import additive, fits, prepared
from hf_specdec.kernels.xformers import attend, fold_bias
from tests.helpers.attention import StrictKernel

HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (4, 1)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}


def tensors(
    heads: str, dtype: str, *, batch: int = 2, queries: int = 5, keys: int = 23, head_dim: int = 16, value_dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries as models make them, keys and values as views of a longer cache."""
    num_heads, num_kv_heads = HEADS[heads]
    query = torch.randn(batch, queries, num_heads, head_dim).transpose(1, 2)
    key, value = (torch.randn(batch, num_kv_heads, keys + 9, size)[:, :, :keys] for size in (head_dim, value_dim))
    return query.to(DTYPES[dtype]), key.to(DTYPES[dtype]), value.to(DTYPES[dtype])


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (key, value))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    output = torch.nn.functional.scaled_dot_product_attention(query.float(), key, value, attn_mask=mask, scale=0.3)
    return output.transpose(1, 2)


def tree_mask(batch: int, queries: int, keys: int, *, text: int) -> torch.Tensor:
    """Columns up to `text` are seen by all, of the rest each query sees its own and some others."""
    mask = torch.rand(batch, 1, queries, keys) < 0.4
    mask[..., :text] = True
    for query in range(queries):
        mask[..., query, keys - queries + query] = True
    return mask


@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_masked_forward_is_torch_s(heads: str, dtype: str, queries: int) -> None:
    """Rows of different masks, text lengths that are no multiples of anything."""
    query, key, value = tensors(heads, dtype, queries=queries, keys=queries + 14)
    mask = tree_mask(2, queries, queries + 14, text=3)
    kernel = StrictKernel()
    output = attend(kernel, query, key, value, mask, 0.3)
    torch.testing.assert_close(
        output.float(), expected(query, key, value, mask), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert output.dtype == query.dtype and output.is_contiguous()
    groups = query.shape[1] // key.shape[1]
    assert kernel.calls == [(groups * queries, queries + 14, True)], "folded, so that keys are not copied"


@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_masks_and_masks_of_heads_are_folded_too(dtype: str) -> None:
    query, key, value = tensors("gqa", dtype)
    for heads in (1, 8):
        mask = torch.randn(2, heads, 5, 23).to(query.dtype)
        mask[:, :, :, 3:9] = torch.finfo(query.dtype).min
        output = attend(StrictKernel(), query, key, value, mask, 0.3)
        torch.testing.assert_close(
            output.float(), expected(query, key, value, mask), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_a_row_that_sees_nothing_is_no_nan() -> None:
    """Padding queries see nothing; what comes out is no one's business, but it must not spread."""
    for dtype in DTYPES:
        query, key, value = tensors("gqa", dtype)
        mask = tree_mask(2, 5, 23, text=3)
        mask[1, :, 0] = False
        assert attend(StrictKernel(), query, key, value, mask, 0.3).isfinite().all()


@pytest.mark.parametrize("keys", range(1, 18))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_of_a_bias_begins_at_16_bytes(dtype: str, keys: int) -> None:
    bias = fold_bias(torch.ones(2, 1, 3, keys, dtype=torch.bool), DTYPES[dtype], 8, 2)
    assert bias.shape == (2, 1, 12, keys)
    assert all(stride * bias.element_size() % 16 == 0 for stride in bias.stride()[:-1])
    assert bias.stride(-1) == 1


def test_a_prompt_s_bias_may_not_outgrow_the_copies_it_saves() -> None:
    """64 queries of 8 heads fold; 4,096 of them would need more room than copied keys and values."""
    key = torch.empty(1, 2, 4096, 64, device="meta")
    for queries, is_small in ((64, True), (4096, False)):
        query = torch.empty(1, 8, queries, 64, device="meta")
        mask = torch.empty(1, 1, queries, 4096, dtype=torch.bool, device="meta")
        assert fits(query, key, key, mask) is is_small
    assert not fits(query, key, key, mask[..., :100]), "a mask of another length is left to torch"


def test_all_layers_of_a_forward_share_one_bias() -> None:
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    made = []

    def make() -> torch.Tensor:
        made.append(additive(mask, torch.float32))
        return made[-1]

    assert all(prepared(mask, "bias", make) is made[0] for _ in range(4))
    assert len(made) == 1


def test_a_mask_changed_in_place_is_another_mask() -> None:
    """A buffer that is filled anew for each forward."""
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 3, 6, dtype=torch.bool)
    before = attend(StrictKernel(), query, key, key, mask, 1.0)
    mask[..., 2] = False
    after = attend(StrictKernel(), query, key, key, mask, 1.0)
    fresh = attend(StrictKernel(), query, key, key, mask.clone(), 1.0)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_under_inference_mode_nothing_is_kept() -> None:
    """torch does not count changes there, so a stale bias could not be told from a good one."""
    with torch.inference_mode():
        mask = torch.ones(1, 1, 3, 6, dtype=torch.bool)
        first = prepared(mask, "bias", lambda: additive(mask, torch.float32))
        mask[..., 2] = False
        assert not torch.equal(prepared(mask, "bias", lambda: additive(mask, torch.float32)), first)
