"""Drafts of several rows: one forward answers all, where they gain together; the draft's cache follows the text."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.networks.draft_runner import DraftRunner
from hf_specdec.forward.networks.runner_base import propose_together
from hf_specdec.methods.common.draft_scorer import at_common_width
from hf_specdec.methods.common.drafter import DraftRequest
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.drafts import TableScorer, random_table
from tests.helpers.zoo import FAMILIES, build

SIZE = 6


class TableRunner:
    """A draft model of several rows, each with a table of its own."""

    def __init__(self, scorers: Sequence[TableScorer]) -> None:
        self.scorers = scorers
        self.num_asked: list[int] = []  # rows, of each forward

    def room(self) -> int:
        return 100

    def score(self, requests: Sequence[DraftTree | None]) -> list[NodeLogits | None]:
        self.num_asked.append(sum(request is not None for request in requests))
        return [
            None if request is None else scorer.score(request)
            for scorer, request in zip(self.scorers, requests, strict=True)
        ]


def drafted(
    relative_costs: Sequence[float], scales: Sequence[float], **fields: int
) -> tuple[list[DraftTree], list[int]]:
    """Each row's tree, and how many rows each forward answers; a scale says how sure the row's drafts are."""
    scorers = [
        TableScorer(random_table(row, SIZE, scale=scale), relative_cost=cost)
        for row, (cost, scale) in enumerate(zip(relative_costs, scales, strict=True))
    ]
    config = DraftModelConfig(**fields)
    drafters = [DraftModelDrafter(config, scorer, token_cost=lambda num_rows, num_nodes: 0.0) for scorer in scorers]
    for drafter in drafters:
        drafter.begin([0])
    runner = TableRunner(scorers)
    request = DraftRequest(20, num_rows=len(drafters))
    trees = propose_together([(drafter, request) for drafter in drafters], runner)  # type: ignore[arg-type]  # stands in
    assert all(tree is not None for tree in trees)
    return [tree for tree in trees if tree is not None], runner.num_asked


@pytest.mark.parametrize("fields", [{"draft_len": 4}, {"draft_len": 4, "num_branches": 2}], ids=["chain", "tree"])
def test_rows_draft_together_what_they_draft_alone_where_forwards_cost_nothing(fields: dict[str, int]) -> None:
    together, wanted = drafted([0.0] * 3, [1.0, 2.0, 8.0], **fields)
    assert wanted == [3] * 4
    alone = drafted([0.0], [1.0], **fields)[0]
    assert together[:1] == alone


def test_a_sure_row_alone_drafts_further_than_beside_unsure_ones() -> None:
    """All of them wait for a forward, whoever asks for it."""
    alone = drafted([0.2], [8.0], draft_len=6)[0]
    temporary = drafted([0.2] * 4, [8.0, 0.1, 0.1, 0.1], draft_len=6)[0]
    assert alone[0].num_draft_tokens > temporary[0].num_draft_tokens > 0


def test_no_row_drafts_where_a_forward_costs_more_than_it_gains() -> None:
    trees, wanted = drafted([2.0] * 3, [8.0] * 3, draft_len=4)
    assert wanted == []
    assert [tree.num_draft_tokens for tree in trees] == [0, 0, 0]


def estimated(seed: int, size: int) -> DraftTree:
    """A random tree whose nodes stand in the order of their probabilities."""
    rng = random.Random(seed)
    builder = TreeBuilder(0)
    probabilities = [1.0]
    for token in range(1, size + 1):
        builder.add(rng.randrange(len(probabilities)), token)
        probabilities.append(probabilities[-1] * rng.uniform(0.5, 1.0))
    return builder.build().with_probabilities(tuple(probabilities))


@pytest.mark.parametrize("seed", range(20))
def test_the_width_gains_most(seed: int) -> None:
    """The sum of the probabilities of what is left, less the bound of each row and column."""
    rng = random.Random(seed)
    trees = [estimated(100 * seed + row, rng.randint(1, 12)) for row in range(rng.randint(1, 4))]
    bounds = [rng.uniform(0.0, 0.5) for _ in trees]

    def gain(width: int) -> float:
        assert all(tree.probabilities is not None for tree in trees)
        kept = sum(sum((tree.probabilities or ())[1 : width + 1]) for tree in trees)
        return kept - width * sum(bounds)

    cut = at_common_width(trees, bounds)
    width = max(tree.num_draft_tokens for tree in cut)
    assert [tree.num_draft_tokens for tree in cut] == [min(width, tree.num_draft_tokens) for tree in trees]
    assert gain(width) == pytest.approx(max(gain(other) for other in range(13)))
    for tree, whole in zip(cut, trees, strict=True):
        assert set(tree.tokens) == set(range(min(width, whole.num_draft_tokens) + 1))
        assert tree.first_branch() == list(tree.tokens[1 : 1 + len(tree.first_branch())])


def test_rows_that_cost_nothing_keep_their_trees() -> None:
    tree = estimated(1, 8)
    assert [len(kept) for kept in at_common_width([tree, tree], [0.0, 0.0])] == [9, 9]


def test_one_row_alone_is_not_worth_what_it_costs_the_others() -> None:
    tree, root = estimated(1, 8), DraftTree.chain(0)
    alone, [together, _] = at_common_width([tree], [0.3]), at_common_width([tree, root], [0.3, 0.9])
    assert len(alone[0]) > 1
    assert len(together) == 1


def test_trees_that_do_not_say_how_probable_their_nodes_are_stay() -> None:
    chain = DraftTree.chain(0, [1, 2, 3])
    assert at_common_width([chain, estimated(1, 4)], [1.0, 1.0])[0] is chain


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
