"""Rows of a batch end, are padded and are processed as plain `generate` does it, whatever the settings."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import (
    IDS,
    MASK,
    METHODS,
    PADDED,
    PROMPT,
    assert_same_batch,
    assert_same_tensors,
    method_of,
    noisy_copy,
    plain,
)
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
Settings = Callable[[list[list[int]]], dict[str, Any]]
# Each from what plain decoding emits for the three rows where nothing ends them.
SETTINGS: dict[str, Settings] = {
    "one row ends at once": lambda new: {"eos_token_id": new[0][0]},
    "all rows end at once": lambda new: {"eos_token_id": sorted({row[0] for row in new})},
    "rows end here and there": lambda new: {"eos_token_id": [new[0][4], new[1][7]]},
    "one new token": lambda new: {"max_new_tokens": 1},
    "two new tokens": lambda new: {"max_new_tokens": 2},
    "no end before the sixth": lambda new: {"min_new_tokens": 6, "eos_token_id": sorted({row[0] for row in new})},
    "max_length": lambda new: {"max_new_tokens": None, "max_length": 37, "eos_token_id": new[1][3]},
    "padding is the end": lambda new: {"eos_token_id": new[0][4], "pad_token_id": new[0][4]},
    "bad words": lambda new: {"bad_words_ids": [[new[0][2]], [new[1][2], new[1][3]]]},
    "biases": lambda new: {"sequence_bias": [[[new[0][2]], -9.0], [[new[1][2], new[1][3]], -8.0]]},
    "forced end": lambda new: {"forced_eos_token_id": 7, "eos_token_id": 7},
    "suppressed": lambda new: {"suppress_tokens": [row[3] for row in new], "begin_suppress_tokens": [new[0][0]]},
    "growing will to end": lambda new: {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": new[0][9],
    },
    "no time": lambda new: {"max_time": 1e-9, "eos_token_id": new[0][9]},
    "prompts read in chunks": lambda new: {"prefill_chunk_size": 7, "eos_token_id": new[0][4]},
    "no row ends early": lambda _: {},
    "a processor sees the padding": lambda new: {
        "eos_token_id": new[0][4],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
    },
    "a long rest": lambda new: {"eos_token_id": new[0][2], "max_new_tokens": 40},
}
MASKS = {
    "padded on the right": MASK.flip(1),
    "holes": MASK.index_fill(1, torch.tensor([12, 15, 16]), 0),
    "last token masked": MASK.index_fill(1, torch.tensor([29]), 0),
}


@pytest.fixture(scope="module")
def families(zoo: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any, list[list[int]]]]:
    @cache
    def family(name: str) -> tuple[Any, Any, list[list[int]]]:
        model = zoo(name)
        new: list[list[int]] = plain(model, PADDED, attention_mask=MASK, **OPTIONS)[:, PADDED.shape[1] :].tolist()
        return model, noisy_copy(model), new

    return family


@pytest.mark.at_most(8)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_every_setting_gives_plain_generates_rows(
    families: Callable[[str], Any], family: str, method: str, setting: str
) -> None:
    model, draft, new = families(family)
    options = OPTIONS | {"attention_mask": MASK} | SETTINGS[setting](new)
    assert_same_batch(model, method_of(method, draft), PADDED, **options)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_masks_of_any_shape_are_respected(families: Callable[[str], Any], family: str, method: str, mask: str) -> None:
    model, draft, new = families(family)
    options = OPTIONS | {"attention_mask": MASKS[mask], "eos_token_id": new[0][4]}
    assert_same_batch(model, method_of(method, draft), IDS, **options)


@pytest.mark.parametrize("shown", ["scores", "logits", "hidden_states"])
def test_what_a_batch_shows_of_each_token_is_decoded_plainly(families: Callable[[str], Any], shown: str) -> None:
    model, _, new = families("llama")
    call = OPTIONS | {"attention_mask": MASK, "return_dict_in_generate": True, f"output_{shown}": True}
    call["eos_token_id"] = new[0][2]
    expected, ours = plain(model, PADDED, **call), model.generate(PADDED, **call, spec_method="auto")
    assert f"output_{shown}" in ours.spec_stats.plain_reason
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_tensors(getattr(ours, shown), getattr(expected, shown))


@pytest.mark.parametrize("method", METHODS)
def test_several_greedy_answers_are_refused_as_in_plain_decoding(families: Callable[[str], Any], method: str) -> None:
    model, draft, _ = families("llama")
    errors = []
    for arguments in ({}, method_of(method, draft)):
        with pytest.raises(ValueError, match="num_return_sequences") as raised:
            model.generate(PADDED, attention_mask=MASK, num_return_sequences=2, **OPTIONS, **arguments)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("plainly", [False, True])
def test_padding_is_not_counted_as_tokens(families: Callable[[str], Any], plainly: bool) -> None:
    """Also where the batch is decoded plainly."""
    model, _, new = families("llama")
    eos = new[0][4]
    output = model.generate(
        PADDED,
        attention_mask=MASK,
        eos_token_id=eos,
        spec_method="prompt_lookup",
        return_dict_in_generate=True,
        stopping_criteria=[lambda ids, _: torch.zeros(len(ids), dtype=torch.bool)] if plainly else None,
        **OPTIONS,
    )
    assert bool(output.spec_stats.plain_reason) == plainly
    assert output.spec_stats.num_tokens == sum((row + [eos]).index(eos) + 1 if eos in row else 12 for row in new)


@pytest.mark.parametrize("method", METHODS)
def test_the_steps_of_each_row_add_up_to_its_text(families: Callable[[str], Any], method: str) -> None:
    model, draft, new = families("llama")
    eos = [new[0][4], new[1][7]]
    steps: list[Any] = []
    output = model.generate(
        PADDED,
        attention_mask=MASK,
        eos_token_id=eos,
        spec_observer=steps.append,
        return_dict_in_generate=True,
        **OPTIONS,
        **method_of(method, draft),
    )
    stats, total = output.spec_stats, 0
    for row, text in enumerate(output.sequences[:, PADDED.shape[1] :].tolist()):
        length = next((place + 1 for place, token in enumerate(text) if token in eos), len(text))
        total += length
        assert [token for step in steps if step.row == row for token in step.accepted] == text[1:length]
    assert stats.num_tokens == total
    assert stats.num_accepted_tokens == sum(len(step.path) - 1 for step in steps)
    assert stats.num_draft_tokens == sum(step.tree.num_draft_tokens for step in steps)
    assert sorted({step.index for step in steps}) == list(range(stats.num_forwards))


HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
LOOKUP: dict[str, Any] = {"spec_method": "prompt_lookup", "return_dict_in_generate": True}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build(FAMILIES["llama"]),
    "lfm2": lambda: build(FAMILIES["lfm2"]),
}


@pytest.mark.parametrize("padding", [-1, VOCAB_SIZE])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_ends_before_the_last_step_is_padded_with_it(name: str, padding: int) -> None:
    """Plain generation writes it and computes nothing after it; rows that cannot leave the batch wait."""
    model, prompts = MODELS[name](), {"input_ids": PADDED[:2], "attention_mask": MASK[:2]}
    new = plain(model, **prompts, **HOW, eos_token_id=None, pad_token_id=0)[:, PADDED.shape[1] :]
    first, second = new.tolist()
    end = max(n for n in range(11) if first[n] not in first[:n] and first[n] not in second[: n + 2])
    settings = HOW | {"max_new_tokens": end + 2, "eos_token_id": first[end], "pad_token_id": padding}
    expected = plain(model, **prompts, **settings)
    assert expected[0, -1] == padding
    output = hf_specdec.enable(model).generate(**prompts, **settings, **LOOKUP)
    assert output.sequences.equal(expected)


def test_a_batch_is_drafted_for_though_the_configuration_names_it() -> None:
    """The probe pads a row too."""
    model = MODELS["llama"]()
    model.config.pad_token_id = model.config.eos_token_id = -1
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = -1
    expected = plain(model, PROMPT.repeat(2, 1), **HOW)
    output = hf_specdec.enable(model).generate(PROMPT.repeat(2, 1), **HOW, **LOOKUP)
    assert output.sequences.equal(expected)
    assert output.spec_stats.plain_reason is None
