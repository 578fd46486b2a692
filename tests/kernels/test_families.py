"""Whole models with the strict kernel in place of xformers', against their own eager attention.

Folding, padded biases, and the text apart from the tree: everything but the kernel itself is what runs on a GPU.
"""

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.compat.caches import CACHE
from tests.helpers.attention import strict_attention
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.support import PROMPT, plain
from tests.kernels.families import OFFERED, STRICT, UNKNOWN, WITHOUT_KERNEL, family_model, implementation, padded

pytestmark = pytest.mark.each_value_in_file
NEW_TOKENS = 16
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def logits(model: Any, name: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of the prompt, of a forward of seven more tokens over its cache, and of one more; padding left out."""
    result = []
    with implementation(model, name), torch.no_grad():
        mask = inputs["attention_mask"]
        is_text = mask.bool()
        output = model(**inputs, use_cache=True)
        result.append(output.logits[is_text])
        for ids in (inputs["input_ids"][:, -7:], inputs["input_ids"][:, -1:]):
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            output = model(input_ids=ids, attention_mask=mask, **{CACHE: output[CACHE]})
            result.append(output.logits)
    return result


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", [name for name in OFFERED if name not in ("t5", "bart", "m2m_100")])
def test_logits_are_those_of_eager_attention(family: str, rows: int) -> None:
    """A prompt, then several tokens and one token over a cache; alone, and in a batch padded on the left."""
    model = family_model(family)
    inputs = padded(PROMPT, rows=rows)
    ours, expected = (logits(model, name, inputs) for name in (STRICT, "eager"))
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
    assert bool(strict_attention(STRICT).kernel.calls) == (family not in WITHOUT_KERNEL)


@pytest.mark.at_most(3)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", OFFERED)
def test_speculation_gives_plain_generate_s_text(family: str, rows: int) -> None:
    """In fp32; some batches decode plainly. The reference is the model with the attention of its own."""
    model = family_model(family)
    inputs = padded(PROMPT, rows=rows)
    with implementation(model, "eager"):
        expected = plain(model, **inputs, **GREEDY)
        tier = hf_specdec.capability(model).tier
    with implementation(model, STRICT):
        assert hf_specdec.capability(model).tier == tier
        assert torch.equal(plain(model, **inputs, **GREEDY), expected)
        for drafter in (OracleDrafter, RandomTreeDrafter):
            texts = iter(expected.tolist())
            output = model.generate(
                **inputs,
                **GREEDY,
                spec_method=lambda: drafter(next(texts)),  # noqa: B023
                return_dict_in_generate=True,
            )
            assert output.sequences.tolist() == expected.tolist()
            is_plain = rows > 1 and output.spec_stats.plain_reason is not None
            assert (output.spec_stats.num_accepted_tokens == 0) == is_plain
        assert bool(strict_attention(STRICT).kernel.calls) == (family not in WITHOUT_KERNEL)


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_model_that_asks_for_more_raises(family: str) -> None:
    model = family_model(family)
    with implementation(model, STRICT), pytest.raises(UnsupportedModelError, match='Use attn_implementation="sdpa"'):
        plain(model, PROMPT, **GREEDY)
