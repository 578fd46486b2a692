"""What is kept on a model: its warnings are given once, the last ones are kept, and a used model can be copied."""

import copy
import logging
import pickle
from typing import Any

import pytest

import hf_specdec
from hf_specdec.engine.model_state import ModelState
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build


def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    state = ModelState()
    with caplog.at_level(logging.WARNING):
        for message in ("one", "two", "one"):
            state.warn_once(message)
    assert caplog.messages == ["one", "two"]


@pytest.mark.parametrize("reads_states", ["plainly", "by a head"])
def test_a_model_whose_hidden_states_were_read_is_copied_and_not_pickled(reads_states: str) -> None:
    """transformers leaves hooks on its layers, whoever asks for hidden states."""
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    if reads_states == "plainly":
        plain(model, PROMPT, **call, return_dict_in_generate=True, output_hidden_states=True)
    else:
        model.generate(PROMPT, **call, spec_method="eagle3", assistant_model=random_head(model))
    expected = plain(model, PROMPT, **call).tolist()
    assert copy.deepcopy(model).generate(PROMPT, **call, spec_method="prompt_lookup").tolist() == expected
    with pytest.raises(AttributeError, match="install_output_capuring_hook"):
        pickle.dumps(model)
