"""Padding that the model cannot embed: -1, as where a checkpoint has none, or an id after the last row."""

from collections.abc import Callable
from typing import Any

import pytest

import hf_specdec
from tests.helpers.support import MASK, PADDED, PROMPT, plain
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

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
