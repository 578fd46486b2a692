"""Every drafter as transformers' `CandidateGenerator`: it drafts from the text it is handed, whatever came before."""

from collections.abc import Callable

import pytest
import torch

from hf_specdec import AutoSpecConfig, DraftModelConfig, LookaheadConfig, PromptLookupConfig
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter
from hf_specdec.methods.plain.method import PlainDrafter
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from tests.helpers.drafts import TableScorer, random_table

DRAFTERS: dict[str, Callable[[], BaseDrafter]] = {
    "plain": PlainDrafter,
    "prompt_lookup": lambda: PromptLookupDrafter(PromptLookupConfig()),
    "lookahead": lambda: LookaheadDrafter(LookaheadConfig()),
    "auto": lambda: AutoDrafter(AutoSpecConfig()),
    "draft_model": lambda: DraftModelDrafter(DraftModelConfig(), TableScorer(random_table(1, 12))),
}
FIRST = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 1, 2]
LATER = {
    "a shorter one": [7, 8, 9, 7, 8],
    "its own beginning": FIRST[:8],
    "one as long": [7, 8, 9, 10, 11, 7, 8, 9, 7, 8, 9, 7],
    "a longer one": [7, 8, 9, 10, 11, 7, 8, 9, 7, 8, 9, 7, 8, 9],
}


@pytest.mark.parametrize("text", LATER.values(), ids=LATER)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_second_prompt_is_drafted_as_by_a_new_drafter(make: Callable[[], BaseDrafter], text: list[int]) -> None:
    drafter = make()
    drafter.get_candidates(torch.tensor([FIRST]))
    drafter.get_candidates(torch.tensor([[*FIRST, 3]]))
    again, logits = drafter.get_candidates(torch.tensor([text]))
    fresh = make()
    fresh.begin(text)
    chain = fresh.draft_for(DraftRequest(fresh.assisted_budget)).first_branch()
    assert again.tolist() == [[*text, *chain]]
    assert logits is None
