"""MTP layers are read from checkpoints as each family publishes them, and compute what the family's formula says."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from tests.helpers.heads import SHAPES, always
from tests.helpers.mtp_layouts import LAYOUTS, Layout, Saved, reference_logits
from tests.helpers.support import PROMPT, plain

Case = tuple[Layout, Saved, Any]


@pytest.fixture(scope="module", params=list(LAYOUTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param)
    saved = layout.save(folder)
    before = saved.target.config.to_dict()
    head = hf_specdec.AutoDraftHead.from_pretrained(str(folder), target=saved.target)
    assert saved.target.config.to_dict() == before
    return layout, saved, head


@pytest.mark.at_most(8)
def test_logits_are_those_of_the_familys_formula(case: Case) -> None:
    layout, saved, head = case
    text = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(layout, saved, text)
    assert head.num_stages == len(expected) == layout.num_layers
    with torch.no_grad():
        states = saved.target(text, output_hidden_states=True).hidden_states[-1]
        embedded = saved.target.get_input_embeddings()(text)
        for stage, logits in enumerate(expected):
            states, positions = states[:, :-1], torch.arange(stage + 1, text.shape[1])[None]
            mask = (positions[..., None] >= positions[:, None])[:, None]
            states = head(
                embedded[:, stage + 1 :], states, positions, mask, DynamicCache(), key_positions=positions, stage=stage
            )
            ours = head.stage_logits(states[0], [stage] * states.shape[1])
            torch.testing.assert_close(ours, logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.at_most(4)
@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_plain_generation(case: Case, shape: str) -> None:
    _, saved, head = case
    expected = plain(saved.target, PROMPT, max_new_tokens=10, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    ours = saved.target.generate(PROMPT, assistant_model=head, **options, **always("mtp", SHAPES[shape]))
    assert torch.equal(ours.sequences, expected)
    assert ours.spec_stats.num_draft_tokens > 0
    assert ours.spec_stats.plain_reason is None
