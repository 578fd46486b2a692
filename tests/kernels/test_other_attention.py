"""Attention implementations that are not ours: FlashAttention, flex, eager, and functions that somebody registers."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.compat.attention import mask_function_of
from tests.helpers.attention import deaf_attention, flash_attention
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.kernels.families import family_model, implementation, padded

pytestmark = pytest.mark.each_value_in_file
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
FLASH = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "mixtral", "opt", "bart"]


@pytest.fixture(scope="module")
def own_model() -> Callable[[str], Any]:
    """A model that no one else holds, so that its log starts anew."""
    return lambda family: hf_specdec.enable(build(FAMILIES[family]))


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", FLASH)
def test_the_double_is_flash_attention(family: str) -> None:
    """It gives the text of the model's own attention, alone and padded: what follows is about nothing else."""
    model = family_model(family)
    for rows in (1, 3):
        expected = plain(model, **padded(PROMPT, rows=rows), **GREEDY)
        with flash_attention(model):
            assert torch.equal(plain(model, **padded(PROMPT, rows=rows), **GREEDY), expected)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("family", FLASH)
def test_under_flash_attention_chains_are_verified(family: str, name: str) -> None:
    """It takes no mask of a tree; the reason says which attention does."""
    with flash_attention(family_model(family), name) as model:
        result = hf_specdec.capability(model)
    assert (result.tier, result.attention) == ("chain", name)
    assert name in result.reason and '"sdpa"' in result.reason


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FLASH)
def test_under_flash_attention_the_text_is_plain_generate_s(family: str, rows: int) -> None:
    """Chains over a cache, windows; batches decode plainly."""
    with flash_attention(family_model(family)) as model:
        inputs = padded(PROMPT, rows=rows)
        expected = plain(model, **inputs, **GREEDY)
        for drafter in (OracleDrafter, RandomTreeDrafter, None):
            texts = iter(expected.tolist())
            method = "prompt_lookup" if drafter is None else lambda: drafter(next(texts))  # noqa: B023
            output = model.generate(**inputs, **GREEDY, spec_method=method, return_dict_in_generate=True)
            assert output.sequences.tolist() == expected.tolist()
            assert output.spec_stats.tier == ("chain" if rows == 1 else "plain")
            assert drafter is None or (output.spec_stats.num_accepted_tokens > 0) == (rows == 1)


def test_chains_only_is_said_once_with_the_remedy(
    own_model: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = own_model("llama")
    with flash_attention(model), caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            model.generate(PROMPT, **GREEDY, spec_method="prompt_lookup")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "'flash_attention_2' attention takes no mask of a tree" in said[0] and '"sdpa"' in said[0]
    with pytest.raises(UnsupportedModelError, match="lookahead.*flash_attention_2"), flash_attention(model):
        model.generate(PROMPT, **GREEDY, spec_method="lookahead")


def registered(name: str, function: Callable[..., Any], mask: Callable[..., Any] | None) -> str:
    """The name, under which transformers now knows the two."""
    AttentionInterface.register(name, function)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    return name


def test_somebody_s_attention_that_takes_masks_gets_trees() -> None:
    """Found by trying, whatever its name."""
    name = registered("tests_own", AttentionInterface()["sdpa"], mask_function_of("sdpa"))
    with implementation(family_model("gemma3"), name) as model:
        expected = plain(model, PROMPT, **GREEDY)
        assert hf_specdec.capability(model).tier == "tree"
        ids = expected[0].tolist()
        output = model.generate(PROMPT, **GREEDY, spec_method=lambda: RandomTreeDrafter(ids))
        assert torch.equal(output, expected)


@pytest.mark.parametrize("kind", ["sdpa", "flash_attention_2", None])
def test_somebody_s_attention_that_is_deaf_to_masks_gets_chains(kind: str | None) -> None:
    """Whether it is given the mask of torch's attention, FlashAttention's or none."""
    name = registered(f"tests_deaf_{str(kind)[:3]}", deaf_attention, mask_function_of(kind))
    with implementation(family_model("llama"), name) as model:
        expected = plain(model, PROMPT, **GREEDY)
        assert hf_specdec.capability(model).tier == "chain"
        ids = expected[0].tolist()
        for drafter in (OracleDrafter, RandomTreeDrafter):
            assert torch.equal(model.generate(PROMPT, **GREEDY, spec_method=lambda: drafter(ids)), expected)  # noqa: B023


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "mistral", "bart", "deepseek_v3"])
def test_eager_attention_is_never_given_booleans(family: str, rows: int) -> None:
    """It adds its mask to the scores: every mask that reaches a layer is additive, in the model's dtype."""
    seen: list[Any] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask"))

    model = hf_specdec.enable(build(FAMILIES[family])) if family in FAMILIES else family_model(family)
    with implementation(model, "eager"):
        inputs = padded(PROMPT, rows=rows)
        expected = plain(model, **inputs, **GREEDY)
        attention = [module for name, module in model.named_modules() if name.endswith("self_attn")]
        handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention]
        try:
            texts = iter(expected.tolist())
            output = model.generate(**inputs, **GREEDY, spec_method=lambda: RandomTreeDrafter(next(texts)))
        finally:
            for handle in handles:
                handle.remove()
    assert torch.equal(output, expected)
    masks = [mask for mask in seen if mask is not None]
    assert masks and all(mask.dtype == model.dtype and mask.dim() == 4 for mask in masks)
