"""The engine tells a drafter all of a step by one object: it sets nothing on it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
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
