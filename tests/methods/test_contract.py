"""The engine tells a drafter all of a step by one object: it sets nothing on it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import AutoSpecConfig, DraftModelConfig, LookaheadConfig, PromptLookupConfig
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter
from hf_specdec.methods.plain.method import PlainDrafter
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from tests.helpers.drafts import TableScorer, random_table
from tests.helpers.support import PROMPT, plain


class Sealed(BaseDrafter):
    """Repeats the last token; raises where anything but that is set on it."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "last", f"{name} is set from outside"
        super().__setattr__(name, value)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.last = prompt_ids[-1]

    def draft_for(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain(self.last, [self.last] * min(request.budget, 2))

    def learn_from(self, result: DraftResult) -> None:
        self.last = result.accepted[-1]


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_nothing_is_set_on_a_drafter(model: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = plain(model, PROMPT, max_new_tokens=12, **how)
    torch.manual_seed(0)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12, spec_method=Sealed, **how), expected)


def test_a_drafter_of_ones_own_finds_the_whole_request_while_it_proposes(model: Any) -> None:
    seen: list[tuple[int, DraftRequest]] = []

    class Repeat(hf_specdec.Drafter):
        def begin(self, prompt_ids: Sequence[int]) -> None:
            self.last = prompt_ids[-1]

        def propose(self, budget: int) -> DraftTree:
            seen.append((budget, self.request))
            return DraftTree.chain(self.last, [self.last] * min(budget, 2))

        def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
            self.last = accepted[-1]

    model.generate(PROMPT.repeat(2, 1), max_new_tokens=8, do_sample=True, spec_method=Repeat)
    assert {budget == request.budget for budget, request in seen} == {True}
    assert seen[0][1].num_rows == 2
    assert seen[0][1].max_depth == 6, "a token is emitted by the prompt's forward, and one follows the draft"
    assert seen[0][1].noise is not None


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
