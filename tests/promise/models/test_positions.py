"""Drafts never reach beyond the model's last position, however the text came in; it ends where plain text ends."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers import zoo, zoo_wide
from tests.helpers.support import (
    PROMPT,
    assert_same_run,
    both,
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
@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
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
