"""Hooks that shorten the cache write plain generate's text; hooks that only look at hidden states keep their drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

PROMPTS = torch.cat([PROMPT, PROMPT.roll(1, dims=1)])  # (2, length)
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
KEPT = 16  # columns that the evicting hook leaves


@pytest.fixture
def model() -> PreTrainedModel:
    return hf_specdec.enable(build(FAMILIES["llama"]))


def layer_of(module: Any, kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache.layers[module.layer_idx]


def halve(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Compress the prompt's columns, as prefill compression does."""
    layer = layer_of(module, kwargs)
    if kwargs["hidden_states"].shape[1] == layer.keys.shape[2] > 1:
        layer.keys, layer.values = layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous()


def evict(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Keep a window of the last columns."""
    layer = layer_of(module, kwargs)
    layer.keys, layer.values = layer.keys[:, :, -KEPT:].contiguous(), layer.values[:, :, -KEPT:].contiguous()


def hook_all(model: Any, hook: Callable[..., Any]) -> list[Any]:
    return [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("method", ["auto", "prompt_lookup", "lookahead", "plain"])
@pytest.mark.parametrize("hook", [halve, evict])
def test_the_text_is_plain_generate_s_from_the_first_call_on(
    model: PreTrainedModel, hook: Callable[..., Any], method: str, rows: int
) -> None:
    hook_all(model, hook)
    ids = PROMPTS[:rows]
    expected = plain(model, ids, **SETTINGS)
    for _ in range(2):
        output = model.generate(ids, **SETTINGS, spec_method=method, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
    reason = f"the hook {hook.__name__} of LlamaAttention gets the cache and may change it"
    assert output.spec_stats.plain_reason == reason


def test_drafts_return_with_the_last_hook(model: PreTrainedModel) -> None:
    """As a context manager around a call sets and removes them."""
    handles = hook_all(model, halve)
    model.generate(PROMPTS[:1], **SETTINGS, spec_method="prompt_lookup")
    for handle in handles:
        handle.remove()
    output = model.generate(PROMPTS[:1], **SETTINGS, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.spec_stats.plain_reason is None
    assert output.sequences.tolist() == plain(model, PROMPTS[:1], **SETTINGS).tolist()


def test_a_hook_that_holds_the_cache_is_one(model: PreTrainedModel) -> None:
    cache = DynamicCache()

    def shorten(module: Any, args: Any, output: Any) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, -KEPT:], layer.values[:, :, -KEPT:]

    model.register_forward_hook(shorten)
    output = model.generate(PROMPTS[:1], **SETTINGS, spec_method="auto", return_dict_in_generate=True, **{CACHE: cache})
    assert "shorten of LlamaForCausalLM" in output.spec_stats.plain_reason


def test_a_hook_on_the_model_s_output_is_one(model: PreTrainedModel) -> None:
    def crop(module: Any, args: Any, output: Any) -> None:
        output[CACHE].crop(-2)

    model.register_forward_hook(crop)
    expected = plain(model, PROMPTS, **SETTINGS)
    for method in ("plain", "prompt_lookup"):
        assert model.generate(PROMPTS, **SETTINGS, spec_method=method).tolist() == expected.tolist()


def test_a_forward_in_the_place_of_attention_s_is_one(model: PreTrainedModel) -> None:
    """It evicts from a length on that a probe's few tokens do not reach."""
    for block in model.model.layers:
        attention, inner = block.self_attn, block.self_attn.forward

        def forward(*args: Any, module: Any = attention, computed: Any = inner, **kwargs: Any) -> Any:
            result, layer = computed(*args, **kwargs), kwargs[CACHE].layers[module.layer_idx]
            if layer.keys.shape[2] > KEPT:
                layer.keys, layer.values = (
                    layer.keys[:, :, -KEPT:].contiguous(),
                    layer.values[:, :, -KEPT:].contiguous(),
                )
            return result

        attention.forward = forward
    expected = plain(model, PROMPTS, **SETTINGS)
    for method in ("plain", "prompt_lookup"):
        assert model.generate(PROMPTS, **SETTINGS, spec_method=method).tolist() == expected.tolist()


def test_a_hook_on_hidden_states_leaves_the_drafts(model: PreTrainedModel) -> None:
    """Steering adds to the states of a layer and gets no cache."""
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.01)
    output = model.generate(PROMPTS[:1], **SETTINGS, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.spec_stats.plain_reason is None
    assert output.sequences.tolist() == plain(model, PROMPTS[:1], **SETTINGS).tolist()
