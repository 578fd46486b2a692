"""A draft model's chains and trees: the likeliest tokens, every forward used, and none that does not pay."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.draft_scorer import at_common_width
from hf_specdec.methods.draft_model.candidates import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.drafts import Table, TableScorer, drafted_by, learned, random_table

SIZE = 6
ALWAYS = {"confidence_threshold": 0.0}


def drafter_of(
    table: Table, text: Sequence[int] = (0,), scorer: dict[str, Any] | None = None, **fields: Any
) -> DraftModelDrafter:
    names = ("logits_processor", "generator", "counts", "token_cost")
    extra = {name: fields.pop(name) for name in names if name in fields}
    drafter = DraftModelDrafter(DraftModelConfig(**fields), TableScorer(table, **(scorer or {})), **extra)
    drafter.begin(text)
    return drafter


def requests_of(drafter: DraftModelDrafter) -> list[DraftTree]:
    return drafter.scorer.requests  # type: ignore[attr-defined]


def argmax_text(table: Table, text: Sequence[int], length: int) -> list[int]:
    tokens = list(text)
    for _ in range(length):
        tokens.append(int(table(tuple(tokens)).argmax()))
    return tokens[len(text) :]


def sure_of(confidence: dict[int, float], size: int = SIZE) -> Table:
    """After token t comes t + 1, with the confidence given for t."""

    def table(text: tuple[int, ...]) -> torch.Tensor:
        share = confidence[text[-1] % size]
        row = torch.full((size,), (1.0 - share) / (size - 1))
        row[(text[-1] + 1) % size] = share
        return row.log()

    return table


def path_probability(table: Table, root: int, path: Sequence[int]) -> float:
    text, share = [root], 1.0
    for token in path:
        share *= float(table(tuple(text)).softmax(-1)[token])
        text.append(token)
    return share


def best_nodes(table: Table, root: int, depth: int, branches: int, count: int) -> set[tuple[int, ...]]:
    """The `count` most probable paths, each step among the `branches` likeliest: by looking at all of them."""
    paths: dict[tuple[int, ...], float] = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(SIZE), repeat=length):
            ranks = [table((root, *path[:place])).argsort(descending=True).tolist() for place in range(length)]
            if all(rank.index(token) < branches for rank, token in zip(ranks, path, strict=True)):
                paths[path] = path_probability(table, root, path)
    return set(sorted(paths, key=lambda path: -paths[path])[:count])


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[step] for step in tree.path(node)[1:]) for node in range(1, len(tree))}


@pytest.mark.parametrize("draft_len", [1, 2, 4, 7])
def test_a_chain_is_the_draft_s_greedy_text(draft_len: int) -> None:
    table = random_table(1, SIZE)
    drafter = drafter_of(table, [3, 1], draft_len=draft_len, **ALWAYS)
    tree = drafted_by(drafter, 100)
    assert tree == DraftTree.chain(1, argmax_text(table, [3, 1], draft_len))
    assert tree.drafted_from is None
    assert len(requests_of(drafter)) == draft_len
    assert requests_of(drafter)[-1].tokens == tree.tokens[:-1], "the last token is drafted, not scored"


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_the_loop_s_budget_is_kept_without_a_wasted_forward(budget: int) -> None:
    for fields in ({}, ALWAYS):
        drafter = drafter_of(random_table(1, SIZE), draft_len=4, **fields)
        assert drafted_by(drafter, budget).num_draft_tokens == budget
        assert len(requests_of(drafter)) == budget
    tree = drafted_by(drafter_of(random_table(4, SIZE), draft_len=3, num_branches=3), budget)
    assert tree.num_draft_tokens == budget


def test_a_fixed_threshold_ends_the_draft_behind_an_unsure_token() -> None:
    table = sure_of({0: 0.9, 1: 0.8, 2: 0.3, 3: 0.9, 4: 0.9, 5: 0.9})
    for threshold, tokens in ((0.4, [1, 2, 3]), (0.85, [1, 2]), (0.2, [1, 2, 3, 4, 5]), (1.0, [1])):
        drafter = drafter_of(table, draft_len=5, confidence_threshold=threshold)
        assert drafted_by(drafter, 100).first_branch() == tokens
        assert len(requests_of(drafter)) == len(tokens)


def test_the_draft_follows_the_text() -> None:
    table = random_table(2, SIZE)
    drafter = drafter_of(table, [4, 5], draft_len=3, **ALWAYS)
    learned(drafter, DraftTree.chain(5), None, [2])
    text = [4, 5, 2]
    for accepted in ([0], [3, 1], [1, 1, 4, 0]):
        tree = drafted_by(drafter, 100)
        assert tree.first_branch() == argmax_text(table, text, 3)
        learned(drafter, tree, None, accepted)
        text += accepted
    assert isinstance(drafter.scorer, TableScorer)
    assert drafter.scorer.text == text


def test_a_chain_of_no_configured_length_grows_while_all_of_it_is_accepted() -> None:
    table = sure_of(dict.fromkeys(range(SIZE), 0.99))
    drafter, lengths = drafter_of(table, scorer={"relative_cost": 0.05}, token_cost=lambda *_: 0.01), []
    for step in range(12):
        tree = drafted_by(drafter, 100)
        lengths.append(tree.num_draft_tokens)
        accepted = [*tree.tokens[1:], (tree.tokens[-1] + 1) % SIZE]
        learned(drafter, tree, None, accepted if step != 1 else accepted[:2])
    assert lengths[:4] == [4, 6, 6, 8], "not after a rejection"
    assert max(lengths) == DraftModelConfig.longest
    fixed = drafter_of(table, draft_len=4, scorer={"relative_cost": 0.05}, token_cost=lambda *_: 0.01)
    for _ in range(3):
        tree = drafted_by(fixed, 100)
        learned(fixed, tree, None, [*tree.tokens[1:], (tree.tokens[-1] + 1) % SIZE])
        assert tree.num_draft_tokens == 4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("depth", "branches", "nodes"), [(2, 3, 6), (3, 2, 8), (3, 4, 12), (4, 2, 5)])
def test_a_tree_holds_the_most_probable_paths(seed: int, depth: int, branches: int, nodes: int) -> None:
    """Compared with looking at every path."""
    table = random_table(seed, SIZE)
    drafter = drafter_of(table, draft_len=depth, num_branches=branches, max_nodes=nodes, **ALWAYS)
    assert paths_of(drafted_by(drafter, 100)) == best_nodes(table, 0, depth, branches, nodes)


@pytest.mark.parametrize("fields", [{}, ALWAYS, {"confidence_threshold": 0.3}])
@pytest.mark.parametrize("seed", range(5))
def test_a_tree_takes_one_forward_a_depth_at_most(seed: int, fields: dict[str, Any]) -> None:
    drafter = drafter_of(random_table(seed, SIZE), draft_len=3, num_branches=3, max_nodes=9, **fields)
    tree = drafted_by(drafter, 100)
    assert 1 <= len(requests_of(drafter)) <= 3
    assert tree.num_draft_tokens <= 9
    assert max(tree.depths) <= 3
    assert all(len(tree.children(node)) <= 3 for node in range(len(tree)))
    first = tree.first_branch()
    assert fields == {} or list(tree.tokens[1 : 1 + len(first)]) == first, "nothing has to move in the cache"


def test_a_draft_that_cannot_score_siblings_still_offers_them() -> None:
    """Requests are chains (`TableScorer` checks it); the nodes besides them were not scored."""
    drafter = drafter_of(
        random_table(6, SIZE), scorer={"takes_trees": False}, draft_len=3, num_branches=3, max_nodes=9, **ALWAYS
    )
    tree = drafted_by(drafter, 100)
    assert not tree.is_chain
    assert len(requests_of(drafter)) == 3


def settle(drafter: DraftModelDrafter, accepts: dict[int, bool], rounds: int) -> list[DraftTree]:
    """Rounds on the text 0, 1, 2, ... in which token t is accepted or not."""
    trees = []
    for _ in range(rounds):
        tree = drafted_by(drafter, 100)
        accepted = []
        for token in tree.first_branch():
            if not accepts[token]:
                break
            accepted.append(token)
        text_end = accepted[-1] if accepted else tree.tokens[0]
        learned(drafter, tree, None, [*accepted, text_end])
        trees.append(tree)
        drafter.begin([0])
    return trees


UNSURE_AT_TWO = sure_of({0: 0.95, 1: 0.65, 2: 0.95, 3: 0.95, 4: 0.95, 5: 0.95})


@pytest.mark.parametrize(("is_accepted", "branch"), [(False, [1, 2]), (True, [1, 2, 3, 4, 5])])
def test_drafts_end_where_tokens_of_that_confidence_were_rejected(is_accepted: bool, branch: list[int]) -> None:
    """Token 2, of confidence 0.65, is never accepted: after a while nothing is scored behind it."""
    accepts = dict.fromkeys(range(6), True) | {2: is_accepted}
    trees = settle(drafter_of(UNSURE_AT_TWO, scorer={"relative_cost": 0.1}, draft_len=5), accepts, 40)
    assert trees[0].first_branch() == [1, 2, 3, 4, 5]
    assert trees[-1].first_branch() == branch


def test_a_dear_draft_stops_sooner_than_a_cheap_one() -> None:
    table = sure_of(dict.fromkeys(range(6), 0.7))
    trees = [
        drafted_by(drafter_of(table, scorer={"relative_cost": cost}, draft_len=8, token_cost=lambda *_: 0.0), 100)
        for cost in (0.0, 0.05, 0.2, 0.3)
    ]
    lengths = [tree.num_draft_tokens for tree in trees]
    assert lengths[0] == 8
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[1]


def verified(drafter: DraftModelDrafter, **fields: Any) -> DraftTree:
    """What the engine leaves of the drafter's tree, in a batch of rows alike."""
    [tree] = at_common_width([drafted_by(drafter, 100, **fields)], [drafter.min_probability])
    return tree


@pytest.mark.parametrize("fields", [{"draft_len": 6}, {"draft_len": 6, "num_branches": 3}], ids=["chain", "tree"])
def test_tokens_are_verified_that_are_worth_what_they_add_to_a_forward(fields: dict[str, int]) -> None:
    """The more rows, the fewer; all, where the configuration says how many or to draft in any case."""

    def num_verified(num_rows: int, **more: Any) -> int:
        cost = {"token_cost": lambda rows, nodes: 0.1 * rows}
        drafter = drafter_of(sure_of(dict.fromkeys(range(6), 0.7)), **cost, **fields, **more)
        return verified(drafter, num_rows=num_rows).num_draft_tokens

    numbers = [num_verified(num_rows) for num_rows in (1, 2, 4, 20)]
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[-1] == 0
    budget = DraftModelConfig(**fields).node_budget
    assert numbers[0] < budget
    assert num_verified(20, max_nodes=budget) == num_verified(20, **ALWAYS) == budget


def test_a_tree_says_how_probable_its_nodes_are() -> None:
    """In the order of their probabilities, unless the configuration says how many there are."""
    tree = drafted_by(drafter_of(random_table(1, SIZE), num_branches=3, draft_len=3), 100)
    assert tree.probabilities is not None
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
    assert (
        drafted_by(drafter_of(random_table(1, SIZE), num_branches=3, draft_len=3, max_nodes=8), 100).probabilities
        is None
    )


def test_a_draft_that_is_never_right_is_asked_now_and_then_only() -> None:
    drafter = drafter_of(sure_of(dict.fromkeys(range(6), 0.9)), scorer={"relative_cost": 0.2})
    accepts = dict.fromkeys(range(6), False)
    settle(drafter, accepts, 60)
    lengths = [drafter_round(drafter) for _ in range(64)]
    assert 2 <= sum(length > 0 for length in lengths) <= 8


def drafter_round(drafter: DraftModelDrafter) -> int:
    tree = drafted_by(drafter, 100)
    learned(drafter, tree, None, [tree.tokens[0]])
    return tree.num_draft_tokens


def test_what_was_learned_serves_the_next_call() -> None:
    accepts = dict.fromkeys(range(6), True) | {2: False}
    counts = AcceptanceCounts()
    cost = {"relative_cost": 0.1}
    settle(drafter_of(UNSURE_AT_TWO, scorer=cost, draft_len=5, counts=counts), accepts, 40)
    assert drafted_by(drafter_of(UNSURE_AT_TWO, scorer=cost, draft_len=5, counts=counts), 100).first_branch() == [1, 2]
    assert drafted_by(drafter_of(UNSURE_AT_TWO, scorer=cost, draft_len=5), 100).num_draft_tokens == 5


@pytest.mark.parametrize("use_logits", [False, True])
def test_drawn_drafts_neither_read_nor_write_what_earlier_calls_learned(use_logits: bool) -> None:
    """They have a part in the text, which has to follow from the seed."""
    counts = AcceptanceCounts()
    drafter = drafter_of(UNSURE_AT_TWO, counts=counts, use_logits=use_logits, logits_processor=lambda ids, row: row)
    with torch.random.fork_rng(devices=[]):
        settle(drafter, dict.fromkeys(range(6), False), 40)
    assert (counts.mean(0) == AcceptanceCounts().mean(0)) is use_logits
    drafter.begin([1, 2, 3])
    assert (drafter.counts.mean(0) == AcceptanceCounts().mean(0)) is use_logits


def test_a_part_of_the_tree_that_was_verified_is_counted() -> None:
    counts = AcceptanceCounts()
    drafter = drafter_of(sure_of(dict.fromkeys(range(6), 0.95)), draft_len=4, counts=counts, **ALWAYS)
    tree = drafted_by(drafter, 100).truncated(max_nodes=2)
    learned(drafter, tree, None, [1, 5])
    expected = AcceptanceCounts()
    expected.record([(0, 0.95, True), (0, 0.95, False)], num_forwards=4, num_tokens=2)
    assert counts.rate(0, 0.95) == expected.rate(0, 0.95)
    assert counts.tokens_per_cost(0.1) == expected.tokens_per_cost(0.1)


def test_a_tree_of_someone_else_is_no_error() -> None:
    """transformers' loop, or a chain tier, verifies other trees than were proposed."""
    drafter = drafter_of(random_table(1, SIZE), num_branches=2, draft_len=2)
    drafted_by(drafter, 100)
    learned(drafter, DraftTree.chain(0, [5, 5, 5]), None, [5, 5, 1])
    assert drafted_by(drafter, 4).tokens[0] == 1
