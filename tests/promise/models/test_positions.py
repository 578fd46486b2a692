"""Drafts never reach beyond the model's last position, however the text came in; it ends where plain text ends."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GlmImageForConditionalGeneration, StoppingCriteria

import hf_specdec
from hf_specdec.compat import CACHE
from tests.helpers import zoo, zoo_wide
from tests.helpers.support import (
    METHODS,
    PROMPT,
    assert_same_run,
    assert_same_tensors,
    both,
    method_of,
    noisy_copy,
    plain,
    run,
)
from tests.promise.conftest import Draft

POSITIONS = 512
LONG = PROMPT.repeat(1, 18)[:, : POSITIONS - 12]

FAMILIES = ["llama", "gpt2", "opt"]  # the last two look positions up in a table, which has an end


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_may_fill_all_positions(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    reference, ours = both(zoo(family), lambda: {"input_ids": LONG, "max_new_tokens": 12}, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) == POSITIONS


class AtTheLastPosition(StoppingCriteria):
    """Ends the text after a number of new tokens, without telling anybody beforehand."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.left -= 1
        return torch.tensor([self.left == 0])


def ending_there(model: Any, inputs: Callable[[], dict[str, Any]]) -> tuple[Callable[[], dict[str, Any]], list[int]]:
    """Inputs that ask for more tokens than there are positions, and a criterion that ends the text on the last one."""
    coming = run(model, plain, lambda: inputs() | {"max_new_tokens": 12}).ids
    return lambda: inputs() | {"max_new_tokens": 40, "stopping_criteria": [AtTheLastPosition(12)]}, coming


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_ends_by_itself_at_the_last_position_is_not_overrun(
    zoo: Callable[[str], Any], draft: Draft, family: str
) -> None:
    make, coming = ending_there(zoo(family), lambda: {"input_ids": LONG})
    reference, ours = both(zoo(family), make, draft, coming)
    assert_same_run(ours, reference)
    assert len(ours.ids) == POSITIONS


@pytest.mark.parametrize("length", [44, 47, 48])
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
def test_a_bias_of_so_many_columns_ends_the_model_too(method: str, length: int) -> None:
    """MPT's, which is no table; beyond it plain generation fails, and so does every method."""
    family = zoo.FAMILIES["mpt"]
    model = hf_specdec.enable(zoo.build(dataclasses.replace(family, options={**family.options, "max_seq_len": 48})))
    how: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    ends = how | {"stopping_criteria": [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= length)]}
    prompt = PROMPT[:, :20]
    assert model.generate(prompt, spec_method=method, **ends).equal(plain(model, prompt, **ends))
    for ids in (prompt, prompt.repeat(2, 1)):
        for arguments in ({}, {"spec_method": method}):
            with pytest.raises(RuntimeError, match="must match the size of tensor b \\(48\\)"):
                model.generate(ids, **how, **arguments)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        model.generate(prompt.repeat(2, 1), attention_mask=mask, pad_token_id=0, spec_method=method, **how)


@pytest.mark.parametrize("stray", [None, 24, 400])
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
def test_a_speech_model_s_decoder_has_positions_by_another_name(
    monkeypatch: pytest.MonkeyPatch, method: str, stray: int | None
) -> None:
    """Whatever a number says that only text models read."""
    monkeypatch.setattr(zoo_wide, "POSITIONS", 48)
    model = hf_specdec.enable(zoo_wide.build(zoo_wide.shrunk("whisper"), "speech", 0.2))
    if stray is not None:
        model.config.max_position_embeddings = stray
    model.generation_config.eos_token_id = None
    inputs, how = zoo_wide.inputs(model, rows=1), {"max_new_tokens": 44, "do_sample": False}
    expected = model.generate(**inputs, **how)
    assert expected.shape[1] >= 44
    assert model.generate(**inputs, **how, spec_method=method).equal(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_without_ids_count_as_positions(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """The text is short, its positions are not."""
    model = zoo(family)
    embeddings = model.get_input_embeddings()(LONG).detach()
    make, coming = ending_there(model, lambda: {"inputs_embeds": embeddings})
    reference, ours = both(model, make, draft, coming)
    assert_same_run(ours, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_tokens_count_as_positions(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """Only the new tokens are given; the cache and the mask hold the rest."""
    model = zoo(family)
    first = plain(model, LONG[:, :-10], max_new_tokens=1, return_dict_in_generate=True)

    def inputs() -> dict[str, Any]:
        return {
            "input_ids": LONG[:, -10:],
            "attention_mask": torch.ones_like(LONG),
            CACHE: copy.deepcopy(first[CACHE]),
        }

    make, coming = ending_there(model, inputs)
    reference, ours = both(model, make, draft, coming)
    assert_same_run(ours, reference)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_given_by_the_caller_count(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    positions = torch.arange(30)[None] + POSITIONS - 42
    make, coming = ending_there(zoo(family), lambda: {"position_ids": positions})
    reference, ours = both(zoo(family), make, draft, coming)
    assert_same_run(ours, reference)


def test_a_model_that_goes_on_beyond_its_positions_is_followed(model: Any, draft: Draft) -> None:
    """Rotary positions have no end; plain decoding goes on as well."""
    reference, ours = both(model, lambda: {"input_ids": LONG, "max_new_tokens": 24}, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) == POSITIONS + 12


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "lookahead"])
def test_positions_that_the_model_keeps_for_an_image_are_followed(
    monkeypatch: pytest.MonkeyPatch, method: str, cache: str
) -> None:
    """GLM-Image's preparation hands no positions to its forward, which counts those of an image's rows and columns."""
    config = zoo_wide.shrunk("glm_image")
    config.text_config.rope_parameters["mrope_section"] = [2, 3, 3]
    config.image_start_token_id, config.image_end_token_id, config.image_token_id = 120, 121, 122
    monkeypatch.setitem(zoo_wide.KINDS, "grid", {type(config): GlmImageForConditionalGeneration})
    model = zoo_wide.build(config, "grid", 0.15)
    drafts = method_of(method, noisy_copy(copy.deepcopy(model)))
    asked: dict[str, Any] = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "max_new_tokens": 20, "do_sample": False}
    asked |= {"return_dict_in_generate": True, "output_logits": True, "cache_implementation": cache}
    expected = copy.deepcopy(model).generate(PROMPT, **asked)
    ours = hf_specdec.enable(model).generate(PROMPT, **asked, **drafts)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_tensors(ours.logits, expected.logits, atol=1e-3)
    assert (ours.spec_stats.plain_reason is None) == (cache == "dynamic")
