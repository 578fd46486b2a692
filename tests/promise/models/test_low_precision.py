"""Half precision works: the tier is found, texts are of the right length, and most tokens agree with plain decoding.

A forward of several tokens rounds differently from one of a single token, so a near tie may fall the other way;
equality is promised in fp32 only.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.cover import wide_but
from tests.helpers.support import MASK, PADDED, PROMPT, plain
from tests.helpers.zoo import FAMILIES, QUICK, build


@pytest.mark.at_most(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", wide_but(QUICK, FAMILIES))
def test_every_family_runs_in_half_precision(family: str, dtype: torch.dtype) -> None:
    """At the tier it has in full precision, and in the cache's own dtype."""
    model = hf_specdec.enable(build(FAMILIES[family]).to(dtype))
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False)[0].tolist()
    output = model.generate(
        PROMPT,
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        spec_method="auto",
        spec_config={"num_nodes": 8, "pool": "request"},
    )
    assert len(output.sequences[0]) == len(expected)
    assert output.spec_stats.tier == FAMILIES[family].tier
    assert output.logits[0].dtype == torch.float32
    cache = getattr(output[CACHE], "self_attention_cache", output[CACHE])
    assert {layer.keys.dtype for layer in cache.layers if hasattr(layer, "keys")} == {dtype}
    same = next(
        (i for i, pair in enumerate(zip(output.sequences[0].tolist(), expected, strict=True)) if len(set(pair)) > 1), 99
    )
    assert same >= len(expected) - 15, "the first token comes from the same forward"


def test_a_change_of_dtype_or_attention_is_noticed(zoo: Callable[[str], Any]) -> None:
    """What was found for one is not taken for the other."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    first = hf_specdec.capability(model)
    assert (first.dtype, first.attention) == ("float32", "sdpa")
    model.to(torch.bfloat16).set_attn_implementation("eager")
    second = hf_specdec.capability(model)
    assert (second.dtype, second.attention) == ("bfloat16", "eager")


def test_autocast_is_not_taken_for_the_models_own_rounding() -> None:
    """Under autocast an fp32 model rounds to half precision; what is found there must not stick to it."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup")
    assert output.shape == (1, 38)
    assert hf_specdec.capability(model).tier == "tree"


def test_values_are_kept_as_plain_keeps_them_where_autocast_rounds_them_alone() -> None:
    """Rotated keys are fp32 there; rows of different lengths are written apart."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    call: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 16, "do_sample": False}
    call["return_dict_in_generate"] = True
    model.generate(PADDED, **call, spec_method="lookahead")  # probes the model outside of autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [plain(model, PADDED, **call), model.generate(PADDED, **call, spec_method="lookahead")]
    assert outputs[1].spec_stats.tier == "tree"
    result = [[(layer.keys.dtype, layer.values.dtype) for layer in item[CACHE].layers] for item in outputs]
    assert result[0] == result[1]


def test_a_static_layer_keeps_what_autocast_rounds() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(model, PROMPT, **call)
        ours = model.generate(PROMPT, **call, cache_implementation="static", spec_method="prompt_lookup")
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_that_autocast_filled_is_continued_without_it(family: str) -> None:
    """Its numbers are then as wide as the new ones, as `torch.cat` makes them."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    answers = []
    for generate in (functools.partial(plain, model), functools.partial(model.generate, spec_method="prompt_lookup")):
        call: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, CACHE: DynamicCache(config=model.config)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = generate(PROMPT, **call)
        answers.append(generate(torch.cat([first, PROMPT[:, :5]], dim=1), **call).tolist())
        answers.append([(layer.keys.dtype, layer.values.dtype) for layer in call[CACHE].layers])
    assert answers[2:] == answers[:2]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_first_call_may_be_made_in_any_gradient_mode(mode: Any) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False).tolist()
    for context in (mode, torch.no_grad):
        with context():
            output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup")
        assert output.tolist() == expected
    assert hf_specdec.capability(model).tier == "tree"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_eager_attention_gives_the_same_text(family: str) -> None:
    model = build(FAMILIES[family])
    model.set_attn_implementation("eager")
    hf_specdec.enable(model)
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False).tolist()
    output = model.generate(
        PROMPT, max_new_tokens=16, do_sample=False, spec_method="auto", spec_config={"num_nodes": 8, "pool": "request"}
    )
    assert output.tolist() == expected
