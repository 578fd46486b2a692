"""`output_attentions`: calls that ask for weights decode plainly, and show what plain generation shows."""

from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers import zoo
from tests.helpers.support import MASK, PADDED, PROMPT, assert_same_tensors, plain

FIELDS = ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions", "hidden_states", "scores")
CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "output_attentions": True, "output_scores": True}


@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
@pytest.mark.parametrize("ids", [PROMPT, PADDED], ids=["row", "batch"])
def test_every_token_has_the_weights_of_its_text(family: str, ids: torch.Tensor) -> None:
    model = hf_specdec.enable(zoo.build(zoo.FAMILIES[family]))
    model.set_attn_implementation("eager")
    call = CALL | {"return_dict_in_generate": True, "output_hidden_states": True}
    call["attention_mask"] = MASK if len(ids) > 1 else torch.ones_like(ids)
    expected = plain(model, ids, **call)
    ours = model.generate(ids, **call, spec_method="auto")
    assert "output_attentions" in ours.spec_stats.plain_reason
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for name in FIELDS:
        assert_same_tensors(getattr(ours, name, None), getattr(expected, name, None))
