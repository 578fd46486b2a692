"""The cache of a draft model follows the text, also over steps in which the draft model is not asked."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.networks.draft_runner import DraftRunner
from tests.helpers.zoo import FAMILIES, build

PROMPT, ROOT, DRAFTED = [5, 6, 7, 8, 9, 10, 11], 20, [30, 31, 32]
# What two steps add to the text; the draft model drafts in the first one alone.
STEPS = {
    "a rejected token comes true later": ([40], [30, 41]),
    "rejected tokens come true later, below an accepted one": ([30, 40], [30, 31, 41]),
    "the draft is accepted": ([30, 31, 40], [41]),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return build(FAMILIES["llama"])


def runner_of(model: Any) -> DraftRunner:
    ids = torch.tensor([PROMPT])
    kwargs = {"use_cache": True, CACHE: DynamicCache(), "position_ids": torch.arange(len(PROMPT))[None]}
    device = torch.device("cpu")
    return DraftRunner(model, ids, kwargs, tier="tree", vocab_size=128, relative_cost=0.1, device=device)


@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_the_draft_s_logits_are_those_of_the_text_after_a_step_without_it(model: Any, name: str) -> None:
    drafting, (first, second) = runner_of(model), STEPS[name]
    drafting.keep(0, [ROOT])
    drafting.score([DraftTree.chain(ROOT, DRAFTED)])
    drafting.keep(0, first)
    drafting.keep(0, second)
    text = [*PROMPT, ROOT, *first, *second]
    (row,) = drafting.score([DraftTree.chain(text[-1])])
    torch.testing.assert_close(row.logits, model(torch.tensor([text])).logits[0, -1:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_columns_of_accepted_tokens_stay_over_a_step_without_the_draft(model: Any) -> None:
    drafting = runner_of(model)
    drafting.keep(0, [ROOT])
    drafting.score([DraftTree.chain(ROOT, DRAFTED)])
    drafting.keep(0, [30, 31, 40])
    drafting.keep(0, [41])
    drafting.score([DraftTree.chain(41)])
    assert drafting.target.rows.num_cached[0] == len(PROMPT) + len([ROOT, 30, 31])
