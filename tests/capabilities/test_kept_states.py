"""Trying a model leaves it the states that its modules keep next to the cache."""

from typing import Any

import torch

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo_wide import build, shrunk


def test_a_text_goes_on_where_the_first_call_is_its_second_turn() -> None:
    """RecurrentGemma's layers keep their states themselves."""
    model = build(shrunk("recurrent_gemma"), "causal", 0.3)
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}

    def begun() -> Any:
        return plain(model, PROMPT, **call, return_dict_in_generate=True)

    first = begun()
    text = torch.cat([first.sequences, PROMPT[:, :4]], dim=1)
    expected = plain(model, text, **call, **{CACHE: first[CACHE]}).tolist()
    again = begun()
    hf_specdec.enable(model)
    assert model.generate(text, **call, **{CACHE: again[CACHE]}, spec_method="prompt_lookup").tolist() == expected
