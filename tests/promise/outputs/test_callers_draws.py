"""A caller's drafter and observer may draw from torch's global generator: the text's random numbers stay its own."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import Drafter
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


def test_a_drafter_that_draws_leaves_the_sample_as_it_is(model: Any) -> None:
    ours = run(model, speculative, lambda: SAMPLED, spec_method=Drawing)
    assert_same_run(ours, run(model, plain, lambda: SAMPLED))


def test_rows_of_a_batch_draw_from_streams_of_their_own(model: Any) -> None:
    """So the drafters' draws go on in the global one."""
    ids, drafters = PROMPT.repeat(2, 1), list[Drawing]()

    def make() -> Drawing:
        drafters.append(Drawing())
        return drafters[-1]

    quiet = run(model, speculative, lambda: {**SAMPLED, "input_ids": ids}, spec_method="plain")
    ours = run(model, speculative, lambda: {**SAMPLED, "input_ids": ids}, spec_method=make)
    assert ours.output.sequences.equal(quiet.output.sequences)
    drawn = [number for drafter in drafters for number in drafter.drawn]
    assert len(set(drawn)) == len(drawn)


class Weighted(Drafter):
    """Drafts one token, drawn from `probabilities` by the global generator, and says so."""

    probabilities = torch.tensor([0.05, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05])

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.root = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        token = int((self.probabilities.cumsum(0) < torch.rand(())).sum().clamp(max=7))
        row = torch.zeros(VOCAB_SIZE)
        row[:8] = self.probabilities
        return dataclasses.replace(DraftTree.chain(self.root, [token]), drafted_from={0: row})

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.root = accepted[-1]


class Few(LogitsProcessor):
    """Leaves eight tokens, so that each is seen often."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(8, scores.shape[1]), -torch.inf)


@pytest.mark.wide
def test_drafted_and_chosen_tokens_are_drawn_independently(model: Any) -> None:
    """Else the text would have another distribution: second tokens, each drafted, against their probabilities."""
    temperature, prompt = 2.0, PROMPT[:, :4]
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": temperature, "max_new_tokens": 3}

    def probabilities(texts: torch.Tensor) -> torch.Tensor:
        """`(rows, 8)` of the token after each text."""
        return (model(texts).logits[:, -1, :8] / temperature).softmax(-1)

    with torch.no_grad():
        pairs = torch.cat([prompt.repeat(8, 1), torch.arange(8)[:, None]], dim=1)
        expected = 300 * probabilities(prompt)[0] @ probabilities(pairs)
    drawn = torch.zeros(8)
    for seed in range(300):
        torch.manual_seed(seed)
        text = model.generate(prompt, **how, logits_processor=[Few()], spec_method=Weighted)
        drawn[text[0, -2]] += 1
    distance = ((drawn - expected) ** 2 / expected).sum()
    assert distance < 30, "chi-square with 7 degrees of freedom; drawn from one stream it is above 45"


def test_a_greedy_call_leaves_the_global_generator_to_other_threads(model: Any) -> None:
    """And what draws next to it goes on from call to call."""
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    drawn: list[float] = []
    torch.manual_seed(3)
    for _ in range(2):
        model.generate(
            PROMPT,
            max_new_tokens=3,
            do_sample=False,
            spec_method="plain",
            spec_observer=lambda _: drawn.append(torch.rand(()).item()),
        )
    assert drawn == expected


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
