"""A caller's drafter and observer may draw from torch's global generator: the text's random numbers stay its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_specdec.methods.base import Drafter
from hf_specdec.tree import DraftTree
from tests.helpers.support import PROMPT, assert_same_run, plain, run, speculative
from tests.helpers.zoo import VOCAB_SIZE

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "max_new_tokens": 20}


class Drawing(Drafter):
    """Drafts tokens that it draws, in every method from the global generator."""

    def __init__(self) -> None:
        self.drawn = [torch.rand(()).item()]

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.drawn.append(torch.rand(()).item())
        self.root = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        self.drawn.append(torch.rand(()).item())
        return DraftTree.chain(self.root, torch.randint(VOCAB_SIZE, (min(budget, 3),)).tolist())

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.drawn.append(torch.rand(()).item())
        self.root = accepted[-1]

    def end(self) -> None:
        torch.rand(3)


class Failing(Drawing):
    def propose(self, budget: int) -> DraftTree:
        torch.rand(5)
        raise RuntimeError("no draft")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafter_that_draws_leaves_the_sample_as_it_is(model: Any, rows: int) -> None:
    """Of a batch each row has a stream of its own; afterwards the global one is where the seeds have left it."""
    ids = PROMPT.repeat(rows, 1)
    quiet = run(model, speculative, lambda: {**SAMPLED, "input_ids": ids}, spec_method="plain")
    ours = run(model, speculative, lambda: {**SAMPLED, "input_ids": ids}, spec_method=Drawing)
    assert ours.output.sequences.equal(quiet.output.sequences)
    assert_same_run(ours, quiet)
    if rows == 1:
        assert_same_run(ours, run(model, plain, lambda: SAMPLED))


def test_what_it_draws_goes_on_from_call_to_call(model: Any) -> None:
    drafter = Drawing()
    run(model, speculative, lambda: SAMPLED, spec_method=drafter)
    later = drafter.drawn[1:]  # the first number is of its making
    assert len(later) > 20
    assert len(set(later)) == len(later)


def test_an_observer_that_draws_leaves_the_sample_as_it_is(model: Any) -> None:
    drawn: list[float] = []
    observe = {"spec_observer": lambda step: drawn.append(torch.rand(()).item())}
    ours = run(model, speculative, lambda: SAMPLED | observe, spec_method="prompt_lookup")
    assert_same_run(ours, run(model, plain, lambda: SAMPLED))
    assert len(set(drawn)) == len(drawn) > 1


def test_an_error_leaves_the_generator_where_the_text_has_left_it(model: Any) -> None:
    torch.manual_seed(7)
    model.generate(PROMPT, do_sample=True, top_k=20, max_new_tokens=1)
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="no draft"):
        model.generate(PROMPT, do_sample=True, top_k=20, max_new_tokens=5, spec_method=Failing)
    assert torch.equal(torch.get_rng_state(), expected)
