"""Hidden states that a draft head asks for are numbered as those of all layers, the embeddings' first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec import compat
from tests.helpers.support import PROMPT


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chosen_states_are_those_of_all_layers(zoo: Callable[[str], Any], family: str) -> None:
    """On the lowest version of transformers too, whose own choice leaves out the embeddings."""
    model = zoo(family)
    last = model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        every = model(PROMPT, output_hidden_states=True).hidden_states
        for layers in ([0], [1, last]):
            found = model(PROMPT, output_hidden_states=compat.hidden_states_option(layers)).hidden_states
            assert all(torch.equal(found[layer], every[layer]) for layer in layers)
