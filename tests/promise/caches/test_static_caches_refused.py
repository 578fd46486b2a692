"""Static caches that speculation leaves to plain decoding, refuses with the remedy, or takes one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import PROMPT, assert_same_run, plain, run, speculative
from tests.helpers.zoo import FALLBACK, FAMILIES
from tests.matrix.test_batches import METHODS

STATIC = {"cache_implementation": "static"}
# MiniMax has a cache of its own, static or not, and transformers' `generate` of Falcon fails over a static one.
CHAINS = [name for name, f in FAMILIES.items() if f.tier == "chain" and name not in ("falcon", "minimax")]


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", [*CHAINS, *FALLBACK])
def test_models_that_verify_no_trees_decode_plainly(zoo: Callable[[str], Any], family: str) -> None:
    model = zoo(family)
    reference = run(model, plain, lambda: dict(STATIC))
    ours = run(model, speculative, lambda: dict(STATIC), **METHODS["prompt_lookup"])
    assert_same_run(ours, reference)
    assert ours.stats.tier == "plain"
    assert ours.stats.plain_reason


def test_the_assisted_engine_leaves_a_static_cache_to_plain_decoding(model: Any) -> None:
    reference = run(model, plain, lambda: dict(STATIC))
    ours = run(
        model, speculative, lambda: dict(STATIC), spec_method="prompt_lookup", spec_config={"engine": "assisted"}
    )
    assert_same_run(ours, reference)
    assert "own cache of keys and values" in ours.stats.plain_reason


def test_a_cache_that_is_too_short_is_refused_before_anything_is_computed(model: Any) -> None:
    cache = StaticCache(model.config, max_cache_len=36)
    with pytest.raises(hf_specdec.ConfigError, match=rf"`{CACHE}` .* at least 37 .* is 36\. Make a longer"):
        speculative(model, PROMPT, **{CACHE: cache}, max_new_tokens=8, spec_method="prompt_lookup")
    assert not cache.is_initialized
    fits = speculative(model, PROMPT, **{CACHE: cache}, max_new_tokens=7, do_sample=False, spec_method="prompt_lookup")
    assert fits.tolist() == plain(model, PROMPT, max_new_tokens=7, do_sample=False).tolist()


@pytest.mark.parametrize("window", [16, None])
def test_a_window_needs_no_more_columns_than_it_has(zoo: Callable[[str], Any], window: int | None) -> None:
    """A cache that is shorter than the window would narrow it."""
    model = zoo("mistral")
    cache = StaticCache(model.config, max_cache_len=window or 12)
    options = {CACHE: cache, "max_new_tokens": 8, "do_sample": False, "spec_method": "prompt_lookup"}
    if window is None:
        with pytest.raises(hf_specdec.ConfigError, match="max_cache_len"):
            speculative(model, PROMPT, **options)
        return
    assert speculative(model, PROMPT, **options).tolist() == run(model, plain, dict).output.sequences[:, :38].tolist()


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static", "quantized", "paged"])
def test_other_implementations_are_refused_by_name(model: Any, name: str) -> None:
    with pytest.raises(hf_specdec.ConfigError, match=f'"dynamic" or "static" .* {name!r}'):
        speculative(model, PROMPT, max_new_tokens=4, cache_implementation=name, spec_method="prompt_lookup")


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_an_offloaded_cache_is_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    cache = kind(config=model.config) if kind is DynamicCache else kind(model.config, max_cache_len=64)
    monkeypatch.setattr(cache, "offloading", True)  # its constructor wants an accelerator
    with pytest.raises(hf_specdec.ConfigError, match=f"`{CACHE}` .* 'offloaded {kind.__name__}'"):
        speculative(model, PROMPT, max_new_tokens=4, **{CACHE: cache}, spec_method="prompt_lookup")


def test_many_prompts_over_static_caches_are_decoded_one_by_one(model: Any) -> None:
    prompts = [PROMPT[0].roll(row).tolist() for row in range(3)]
    options = {"max_new_tokens": 8, "do_sample": False}
    output = {
        result.index: result.token_ids
        for result in hf_specdec.generate_many(model, prompts, spec_method="prompt_lookup", **STATIC, **options)
    }
    for index, prompt in enumerate(prompts):
        expected = plain(model, torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert output[index] == expected.tolist()
