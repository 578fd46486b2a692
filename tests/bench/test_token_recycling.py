"""Token Recycling drafts what the paper's tree and matrix say, remembers as long as it should, and changes no text."""

import random
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.common.entry import DrafterContext, MethodState
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.token_recycling import (
    STATIC_TREE,
    TOKEN_RECYCLING,
    AdjacencyMatrix,
    TokenRecyclingConfig,
    TokenRecyclingDrafter,
)
from tests.bench.conftest import PROMPTS

VOCAB = 40


def spelled_out(children: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The tree as paths of candidate ranks, breadth first."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for counts in children:
        level = [(*path, rank) for path, count in zip(level, counts, strict=False) for rank in range(count)]
        paths += level
    return paths


def literal_tree(rows: dict[int, list[int]], root: int) -> set[tuple[int, ...]]:
    """The reference: every path of ranks followed through the matrix, as paths of tokens."""
    found = set()
    for ranks in spelled_out(STATIC_TREE):
        tokens = [root]
        for rank in ranks:
            tokens.append(rows[tokens[-1]][rank] if tokens[-1] in rows else -1)
        if -1 not in tokens:
            found.add(tuple(tokens[1:]))
    return found


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[node] for node in tree.path(place)[1:]) for place in range(1, len(tree))}


def logits_for(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_the_static_tree_has_the_authors_80_nodes() -> None:
    """Levels of 8, 21, 25, 15, 8 and 3 nodes; the authors' listing names these among them, and not those."""
    paths = spelled_out(STATIC_TREE)
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert {(7, 0), (1, 3), (0, 1, 2), (5, 0, 0), (0, 0, 4, 0), (3, 0, 0, 0), (1, 0, 0, 0, 0)} <= set(paths)
    assert not {(1, 4), (6, 0, 0), (0, 0, 5, 0), (2, 0, 0, 0, 0)} & set(paths)
    assert {path for path in paths if len(path) == 6} == {(0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)}
    assert all(path[:-1] in {(), *paths} for path in paths)
    assert TokenRecyclingConfig().node_budget == 80


def test_every_verified_node_overwrites_its_row_and_the_tree_follows() -> None:
    """Against a dictionary of sorted candidates, over random trees that hold tokens twice."""
    rng, rows, drafter = random.Random(0), dict[int, list[int]](), TokenRecyclingDrafter()
    drafter.begin([3])
    tree = drafter.propose(80)
    for step in range(30):
        logits = logits_for(len(tree), step)
        for token, row in zip(tree.tokens, logits.tolist(), strict=True):
            rows[token] = sorted(range(VOCAB), key=row.__getitem__, reverse=True)[:8]
        root = rng.randrange(VOCAB)
        drafter.observe(tree, logits, [root])
        assert {token: drafter.matrix.candidates(token) for token in range(VOCAB)} == {
            token: rows.get(token, []) for token in range(VOCAB)
        }
        tree = drafter.propose(80)
        assert paths_of(tree) == literal_tree(rows, root)
    assert tree.num_draft_tokens == 80


def test_nothing_is_drafted_where_nothing_is_known() -> None:
    drafter = TokenRecyclingDrafter()
    drafter.begin([3])
    assert drafter.propose(80).num_draft_tokens == 0
    drafter.observe(DraftTree.chain(3), logits_for(1, 0), [5])
    assert drafter.propose(80).num_draft_tokens == 0  # 5 has no row yet
    drafter.observe(DraftTree.chain(5), None, [3])
    assert drafter.propose(80).depths.count(1) == 8


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_smaller_budget_takes_the_first_nodes(budget: int) -> None:
    drafter = TokenRecyclingDrafter()
    drafter.begin([0])
    drafter.matrix.update(range(VOCAB), logits_for(VOCAB, 0))
    whole = drafter.propose(80)
    assert drafter.propose(budget).tokens == whole.tokens[: budget + 1]


def test_extra_rows_of_logits_are_no_nodes() -> None:
    matrix = AdjacencyMatrix()
    drafter = TokenRecyclingDrafter(matrix)
    drafter.begin([1])
    drafter.observe(DraftTree.chain(1), logits_for(3, 0), [2])
    assert [token for token in range(VOCAB) if matrix.candidates(token)] == [1]


@pytest.mark.parametrize(("hot_start", "remembers"), [(True, True), (False, False)])
def test_a_hot_start_keeps_the_matrix_between_calls(hot_start: bool, remembers: bool) -> None:
    context, config = DrafterContext(MethodState()), TokenRecyclingConfig(hot_start=hot_start)
    first = TOKEN_RECYCLING.make(config, context)
    first.begin([1])
    first.observe(DraftTree.chain(1), logits_for(1, 0), [2])
    second = TOKEN_RECYCLING.make(config, context)
    second.begin([1])
    assert (second.propose(80).num_draft_tokens > 0) == remembers


@pytest.mark.wide
def test_a_run_gives_plain_s_tokens_greedy_and_sampled_with_80_nodes(loaded: LoadedModel) -> None:
    settings = BenchSettings(max_new_tokens=24, rounds=1)
    rows = ["token_recycling", "token_recycling:hot_start=False"]
    (entry,) = Bench([loaded], PROMPTS, settings, rows=rows).run()["models"]
    for mode in ("greedy", "sampled"):
        assert [entry["summary"][mode][row]["share_equal"] for row in rows] == [1.0, 1.0]
    drafted = {row: [max(r.get("drafted", [0])) for r in entry["records"] if r["row"] == row] for row in rows}
    assert max(drafted["token_recycling"]) > max(drafted["token_recycling:hot_start=False"])
    assert max(drafted["token_recycling"]) <= 80


def test_the_matrix_is_the_bench_s_and_not_the_model_s(loaded: LoadedModel) -> None:
    """Rows have memories of their own, so a run leaves nothing behind on the model."""
    Bench([loaded], PROMPTS[:1], BenchSettings(max_new_tokens=4, rounds=1), rows=["token_recycling"]).run()
    assert TOKEN_RECYCLING.name not in state_of(loaded.model).method_state.by_name


def test_generate_takes_the_method_itself(loaded: LoadedModel) -> None:
    inputs: Any = loaded.tokenizer(PROMPTS[0].turns[0], return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = loaded.model.generate(**inputs, **options)
    ours = loaded.model.generate(**inputs, **options, spec_method=TOKEN_RECYCLING, spec_config={"hot_start": False})
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.spec_stats.method == "token_recycling"
