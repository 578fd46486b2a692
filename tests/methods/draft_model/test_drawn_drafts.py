"""Drafts whose tokens are drawn: from which probabilities, within which budgets, by which random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.methods.draft_model.candidates import AcceptanceCounts
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.drafts import Table, drafted_by, random_table
from tests.methods.draft_model.test_draft_model import ALWAYS, SIZE, drafter_of, requests_of


def drawing(seed: int = 0, table: Table | None = None, **fields: Any) -> DraftModelDrafter:
    return drafter_of(
        table or random_table(7, SIZE),
        use_logits=True,
        logits_processor=lambda ids, row: row / 0.8,
        generator=torch.Generator().manual_seed(seed),
        **fields,
    )


CHAIN = {"draft_len": 3, "num_branches": 3, "max_nodes": 8}


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_says_what_its_tokens_were_drawn_from(seed: int) -> None:
    """Whatever `num_branches`: a forward for each token, as far as `draft_len` allows."""
    table = random_table(7, SIZE)
    drafter = drawing(seed, table=table, **CHAIN, **ALWAYS)
    tree = drafted_by(drafter, 100)
    assert tree.parents == (-1, 0, 1, 2)
    assert tree.drafted_from is not None and [*tree.drafted_from] == [0, 1, 2]
    assert len(requests_of(drafter)) == 3
    for node, q in tree.drafted_from.items():
        text = tuple(tree.tokens[step] for step in tree.path(node))
        assert torch.allclose(q, (table(text) / 0.8).softmax(-1))
        assert q[tree.tokens[node + 1]] > 0
    assert drafted_by(drawing(seed, table=table, **CHAIN, **ALWAYS), 2).tokens == tree.tokens[:3]


def test_the_same_seed_draws_the_same_drafts_whatever_was_counted_before() -> None:
    """A text depends on its drafts here, so it must not depend on earlier calls."""
    counts = AcceptanceCounts()
    first = drafted_by(drawing(3, **CHAIN, counts=counts), 100)
    for _ in range(200):
        counts.record([(0, 0.5, False), (1, 0.2, True)], num_forwards=3, num_tokens=1)
    assert drafted_by(drawing(3, **CHAIN, counts=counts), 100) == first


@pytest.mark.parametrize("use_logits", [True, False])
def test_nodes_of_one_depth_are_processed_at_once(use_logits: bool) -> None:
    """Each next to its own text, as if it were alone; the likeliest nodes of one forward are of several depths."""
    seen: list[list[list[int]]] = []

    def at_once(texts: Callable[[], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        seen.append(texts().tolist())
        return rows * (1.0 + 0.1 * texts()[:, -1:])

    def alone(texts: Callable[[], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * (1.0 + 0.1 * ids[-1]) for ids, row in zip(texts(), rows, strict=True)])

    fields = CHAIN if use_logits else {"draft_len": 8, "num_branches": 6, "max_nodes": 60}
    trees = []
    for logits_processor in (at_once, alone):
        drafter = drafter_of(
            random_table(8, SIZE),
            [2, 0, 3],
            use_logits=use_logits,
            logits_processor=logits_processor,
            generator=torch.Generator().manual_seed(0),
            **fields,
            **ALWAYS,
        )
        trees.append(drafted_by(drafter, 100))
    assert trees[0] == trees[1]
    assert all(text[:3] == [2, 0, 3] for texts in seen for text in texts)
    num_forwards = len(requests_of(drafter))
    assert len(seen) == num_forwards if use_logits else len(seen) > num_forwards


def test_tokens_that_the_draft_s_processors_forbid_are_not_drafted() -> None:
    def logits_processor(ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return row.masked_fill(torch.arange(SIZE) > 1, -torch.inf)

    for use_logits in (False, True):
        with torch.random.fork_rng(devices=[]):
            tree = drafted_by(
                drafter_of(
                    random_table(9, SIZE),
                    use_logits=use_logits,
                    num_branches=4,
                    draft_len=2,
                    logits_processor=logits_processor,
                    **ALWAYS,
                ),
                100,
            )
        assert set(tree.tokens[1:]) <= {0, 1} and len(tree) > 2
