"""`generate_many` where prompts cannot share a batch, and the numbers that it is given for them."""

import logging
import warnings
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import plain
from tests.helpers.zoo import FALLBACK, FAMILIES, build

SAMPLED: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11], [5, 6, 7, 5, 6]]
APART = ["minimax", "t5", "recurrent_gemma"]  # chains, an encoder, no speculation


def build_any(family: str) -> Any:
    return build({**FAMILIES, **FALLBACK}[family])


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", APART)
def test_the_global_generator_goes_on_where_it_was_after_a_prompt_that_samples(family: str) -> None:
    model = build_any(family)
    expected = []
    for index, prompt in enumerate(PROMPTS):
        torch.manual_seed(3 + index)
        new = plain(model, torch.tensor([prompt]), max_new_tokens=8, do_sample=True)[0]
        expected.append(new[1 if model.config.is_encoder_decoder else len(prompt) :].tolist())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = {r.index: r.token_ids for r in hf_specdec.generate_many(model, PROMPTS, **SAMPLED)}
    assert result == dict(enumerate(expected))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.each_value
@pytest.mark.parametrize("family", APART)
def test_decoding_one_by_one_is_said_once_with_its_reason(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_any(family)
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        for _ in range(2):
            list(hf_specdec.generate_many(model, PROMPTS, max_new_tokens=2, do_sample=False))
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert said[0].startswith(f"{type(model).__name__} decodes prompts one by one, whatever max_batch_size is: ")


def test_a_prompt_decoded_alone_among_others_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.tensor([PROMPTS[0]])
    shifted = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None] + 4}
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        list(hf_specdec.generate_many(build_any("llama"), [PROMPTS[1], shifted, shifted], max_new_tokens=2))
    said = [record.message for record in caplog.records]
    assert said == ["LlamaForCausalLM decodes some prompts alone: its position_ids do not count from 0"]


@pytest.mark.parametrize("indices", [[4, 5], iter([4, 5]), [4, 5, 4], [None] * 3])
def test_numbers_that_do_not_name_each_prompt_are_an_error(indices: Any) -> None:
    with pytest.raises(hf_specdec.ConfigError, match="`indices` must hold a whole number for every prompt, and none"):
        list(hf_specdec.generate_many(build_any("llama"), PROMPTS, indices=indices, max_new_tokens=2))


def test_results_carry_the_numbers_they_were_given() -> None:
    results = hf_specdec.generate_many(build_any("llama"), PROMPTS, indices=range(7, 100), max_new_tokens=2)
    assert {result.index: result.prompt for result in results} == dict(zip((7, 8, 9), PROMPTS, strict=True))


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_prompt_decoded_alone_is_decoded_once(family: str) -> None:
    """Before anything is known of the model: on an encoder-decoder, and padded next to a short text."""
    seen: list[int] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return scores

    padded = {"input_ids": torch.tensor([[0, *PROMPTS[0]]]), "attention_mask": torch.tensor([[0] + [1] * 6])}
    prompts = [{**padded, "logits_processor": [watch], "eos_token_id": None}, PROMPTS[1]]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": list(range(128))}
    results = list(hf_specdec.generate_many(build_any(family), prompts, **options))
    assert sorted(result.index for result in results) == [0, 1]
    assert len(seen) == 16
