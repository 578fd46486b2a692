"""Drafts of several rows: one forward answers all, and is made where they gain from it together."""

from collections.abc import Sequence

import pytest

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.networks.runner_base import propose_together
from hf_specdec.methods.common.drafter import DraftRequest
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.drafts import TableScorer, random_table

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
