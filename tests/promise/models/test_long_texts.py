"""Texts that outgrow the length a model was trained for: what plain generation does, whatever is drafted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.compat import CACHE
from tests.helpers.support import PROMPT, noisy_copy, plain
from tests.helpers.zoo import DECODER, Family, build
from tests.promise.conftest import Draft

LENGTH = 40  # after which the frequencies change
NTK = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LENGTH,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}


def family(config: str, **options: Any) -> Family:
    return Family(name="", config=config, options=DECODER | options, seed=2)


# The frequencies change with every token; once, the cache kept; once, and the cache is computed anew.
MODELS = {
    "ntk": family("LlamaConfig", rope_parameters=NTK, max_position_embeddings=LENGTH),
    "longrope": family("LlamaConfig", rope_parameters=LONG),
    "phi3": family("Phi3Config", rope_parameters=LONG, original_max_position_embeddings=LENGTH),
}
SHORT = torch.tensor([[5, 6, 7]])
NEW = {"max_new_tokens": 18, "do_sample": False}
LENGTHS = {"crossing": 30, "at": LENGTH, "beyond": LENGTH + 13}


@pytest.fixture(scope="module", params=MODELS)
def long_model(request: pytest.FixtureRequest) -> Any:
    return hf_specdec.enable(build(MODELS[request.param]))


def fresh(model: Any) -> Any:
    """The model as if it had never seen a long text: what its rotary modules remember changes plain generation too."""
    plain(model, SHORT, max_new_tokens=1)
    return model


def prompt_of(length: int) -> torch.Tensor:
    return PROMPT.repeat(1, 3)[:, :length]


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_text_that_crosses_the_length_is_plain_generations(long_model: Any, draft: Draft, length: int) -> None:
    prompt = prompt_of(length)
    expected = plain(fresh(long_model), prompt, **NEW)[0].tolist()
    fresh(long_model)
    output = long_model.generate(prompt, **NEW, **draft(expected), return_dict_in_generate=True)
    is_once = length > LENGTH and long_model.config.rope_parameters["rope_type"] == "longrope"
    reason = output.spec_stats.plain_reason
    assert reason is None if is_once else "within this text" in reason or "follow the text's length" in reason
    assert output.sequences[0].tolist() == expected


@pytest.mark.at_most(1)
@pytest.mark.parametrize("padding", [(0, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_padded_batch_that_crosses_the_length_is_plain_generations(
    long_model: Any, length: int, padding: tuple[int, int]
) -> None:
    ids = prompt_of(length).repeat(2, 1)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count] = mask[row, :count] = 0
        ids[row, count:] = ids[row, count:].roll(row)
    expected = plain(fresh(long_model), ids, attention_mask=mask, **NEW).tolist()
    fresh(long_model)
    ours = long_model.generate(ids, attention_mask=mask, **NEW, spec_method="prompt_lookup")
    assert ours.tolist() == expected


def test_what_a_long_text_leaves_behind_is_what_plain_generation_leaves(long_model: Any) -> None:
    """The next prompt, too long for the original frequencies, is read with those of the text before."""
    first, second = prompt_of(30), prompt_of(LENGTH + 2)
    texts = []
    for method in ({}, {"spec_method": "prompt_lookup"}):
        fresh(long_model)
        generate = long_model.generate if method else lambda *a, **k: plain(long_model, *a, **k)
        texts.append([generate(prompt, **NEW, **method).tolist() for prompt in (first, second)])
    assert texts[0] == texts[1]


def test_the_cache_of_a_long_text_is_plain_generations(long_model: Any) -> None:
    prompt = prompt_of(30)
    settings = NEW | {"return_dict_in_generate": True}
    expected = plain(fresh(long_model), prompt, **settings)[CACHE]
    ours = fresh(long_model).generate(prompt, **settings, spec_method="prompt_lookup")[CACHE]
    for own, other in zip(ours.layers, expected.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)


def test_many_prompts_of_different_lengths_are_each_plain_generations(long_model: Any) -> None:
    prompts = [prompt_of(length) for length in (33, LENGTH + 5)]
    expected = []
    for prompt in prompts:
        expected.append(plain(fresh(long_model), prompt, **NEW)[0, prompt.shape[1] :].tolist())
    found = {}
    for prompt in prompts:  # each from the same state, as plain
        fresh(long_model)
        (result,) = hf_specdec.generate_many(long_model, [prompt], **NEW)
        found[prompt.shape[1]] = result.token_ids
    assert [found[prompt.shape[1]] for prompt in prompts] == expected


def test_a_draft_model_may_outgrow_its_own_length(zoo: Callable[[str], Any], long_model: Any) -> None:
    """And a target that has no such length goes on."""
    target = zoo("llama")
    prompt = prompt_of(30)
    expected = plain(target, prompt, **NEW).tolist()
    for config in ({}, {"num_branches": 2}):
        draft = noisy_copy(long_model, noise=0.01)
        output = target.generate(prompt, **NEW, spec_method="draft_model", assistant_model=draft, spec_config=config)
        assert output.tolist() == expected
    ours = long_model
    expected = plain(fresh(ours), prompt, **NEW).tolist()
    draft = noisy_copy(ours, noise=0.01)
    assert fresh(ours).generate(prompt, **NEW, spec_method="draft_model", assistant_model=draft).tolist() == expected


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_prompt_beyond_the_last_position_is_read_where_no_table_ends(
    name: str, zoo: Callable[[str], Any], draft: Draft
) -> None:
    """Rotary positions and linear biases go on; drafts are made there too."""
    model = zoo(name)
    prompt = PROMPT.repeat(1, 18)
    assert prompt.shape[1] > 512
    expected = plain(model, prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    output = model.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **draft(expected))
    assert output.sequences[0].tolist() == expected


@pytest.mark.parametrize("length", [10, 24, 30], ids=["crossing", "at", "beyond"])
def test_a_table_of_positions_that_grows_ends_nowhere(draft: Draft, length: int) -> None:
    small = {"vocab_size": 96, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "num_attention_heads": 4}
    grows = Family(name="", config="XGLMConfig", options=small | {"max_position_embeddings": 24}, seed=2)
    prompt = prompt_of(length)
    expected = plain(hf_specdec.enable(build(grows)), prompt, **NEW)[0].tolist()
    model = hf_specdec.enable(build(grows))
    output = model.generate(prompt, **NEW, **draft(expected), return_dict_in_generate=True)
    assert output.sequences[0].tolist() == expected
    assert output.spec_stats.plain_reason is None


@pytest.mark.at_most(1)
@pytest.mark.parametrize("config", [{}, {"num_branches": 2}], ids=["chain", "tree"])
def test_a_draft_of_another_length_crosses_it_in_a_padded_batch(
    zoo: Callable[[str], Any], long_model: Any, config: dict[str, Any]
) -> None:
    ids = prompt_of(30).repeat(2, 1)
    ids[1] = ids[1].roll(1)
    mask = torch.ones_like(ids)
    ids[0, :9] = mask[0, :9] = 0
    for target in (zoo("llama"), long_model):
        expected = plain(fresh(target), ids, attention_mask=mask, **NEW).tolist()
        drafts = {
            "assistant_model": noisy_copy(long_model, noise=0.01),
            "spec_config": {"confidence_threshold": 0.0, **config},
        }
        ours = fresh(target).generate(ids, attention_mask=mask, **NEW, spec_method="draft_model", **drafts)
        assert ours.tolist() == expected


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_prompt_beyond_a_table_of_positions_is_refused(name: str, zoo: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="`input_ids` must be at most 512 tokens long"):
        zoo(name).generate(PROMPT.repeat(1, 18), max_new_tokens=4, spec_method="prompt_lookup")
