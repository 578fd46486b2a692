"""What is kept on a mask: made once, forgotten with it, never stale."""

import torch

from hf_specdec.kernels.core_attention import additive, prepared
from hf_specdec.kernels.xformers import attend
from tests.helpers.attention import StrictKernel


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
