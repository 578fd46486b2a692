"""Texts that outgrow the length a model was trained for: what plain generation does, whatever is drafted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
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
    reason = output.spec_stats.plain_reason
    assert "within this text" in reason or "follow the text's length" in reason
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


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_prompt_beyond_a_table_of_positions_is_refused(name: str, zoo: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="`input_ids` must be at most 512 tokens long"):
        zoo(name).generate(PROMPT.repeat(1, 18), max_new_tokens=4, spec_method="prompt_lookup")
