"""A draft tree agrees with the obvious way to compute everything about it."""

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from hf_specdec.common.tree import DraftTree, ExtraTokens, TreeBuilder
from hf_specdec.errors import ConfigError


def random_tree(seed: int, num_nodes: int) -> DraftTree:
    rng = random.Random(seed)
    builder = TreeBuilder(rng.randrange(10))
    while len(builder) < num_nodes:
        builder.add(rng.randrange(len(builder)), rng.randrange(10))
    return builder.build()


def ancestors(tree: DraftTree, node: int) -> set[int]:
    """The reference: follow the parents up."""
    result = {node}
    while tree.parents[node] != -1:
        node = tree.parents[node]
        result.add(node)
    return result


TREES = [random_tree(seed, num_nodes) for seed in range(10) for num_nodes in (1, 2, 5, 17)]


@pytest.mark.parametrize("tree", TREES)
def test_every_node_follows_its_parent_one_level_deeper(tree: DraftTree) -> None:
    assert tree.parents[0] == -1
    assert tree.depths[0] == 0
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
    assert tree.num_draft_tokens == len(tree) - 1 == len(tree.tokens) - 1


@pytest.mark.parametrize("tree", TREES)
def test_a_node_sees_itself_and_its_ancestors(tree: DraftTree) -> None:
    mask = tree.visible()
    assert mask.dtype == torch.bool
    expected = [[other in ancestors(tree, node) for other in range(len(tree))] for node in range(len(tree))]
    assert mask.tolist() == expected


@pytest.mark.parametrize("tree", TREES)
def test_the_path_to_a_node_is_its_ancestors_from_the_root_down(tree: DraftTree) -> None:
    for node in range(len(tree)):
        assert tree.path(node) == sorted(ancestors(tree, node))


@pytest.mark.parametrize("tree", TREES)
def test_children_are_found_by_token_and_in_the_order_they_were_added(tree: DraftTree) -> None:
    for node in range(len(tree)):
        expected = [child for child in range(len(tree)) if tree.parents[child] == node]
        assert list(tree.children(node)) == expected
        by_token = {tree.tokens[child]: child for child in expected}
        assert len(by_token) == len(expected), "siblings hold different tokens"
        assert [tree.child(node, token) for token in range(10)] == [by_token.get(token) for token in range(10)]


@pytest.mark.parametrize("max_depth", [None, 0, 1, 3])
@pytest.mark.parametrize("max_nodes", [None, 0, 1, 4, 100])
def test_a_truncated_tree_is_what_is_left_of_the_tree(max_depth: int | None, max_nodes: int | None) -> None:
    """The first `max_nodes` drafts that are shallow enough, with the same paths of tokens."""
    for tree in TREES:
        kept = [node for node in range(1, len(tree)) if max_depth is None or tree.depths[node] <= max_depth]
        expected = [[tree.tokens[step] for step in tree.path(node)] for node in kept[:max_nodes]]
        cut = tree.truncated(max_depth=max_depth, max_nodes=max_nodes)
        assert [[cut.tokens[step] for step in cut.path(node)] for node in range(1, len(cut))] == expected
        assert cut.tokens[0] == tree.tokens[0]


def test_a_chain_is_a_tree_of_one_branch() -> None:
    tree = DraftTree.chain(7, [11, 12, 11])
    assert tree.tokens == (7, 11, 12, 11)
    assert tree.parents == (-1, 0, 1, 2)
    assert tree.depths == (0, 1, 2, 3)
    assert tree.is_chain
    assert torch.equal(tree.visible(), torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("tree", TREES)
def test_is_chain_says_whether_any_node_has_a_sibling_or_lies_off_the_branch(tree: DraftTree) -> None:
    assert tree.is_chain == (tree == DraftTree.chain(tree.tokens[0], tree.tokens[1:]))


def test_two_branches_merge_where_they_begin_alike() -> None:
    builder = TreeBuilder(7)
    end_of_first = builder.add_path(0, [1, 2, 3])
    end_of_second = builder.add_path(0, [1, 2, 4, 5])
    tree = builder.build()
    assert tree.tokens == (7, 1, 2, 3, 4, 5)
    assert [tree.tokens[node] for node in tree.path(end_of_first)] == [7, 1, 2, 3]
    assert [tree.tokens[node] for node in tree.path(end_of_second)] == [7, 1, 2, 4, 5]


def test_equal_trees_are_equal_and_survive_copies() -> None:
    tree = random_tree(3, 9)
    assert tree == random_tree(3, 9)
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert twin == tree
        assert [twin.children(node) for node in range(9)] == [tree.children(node) for node in range(9)]


NO_PROBABILITIES = [(1.0,), (1.0, 0.5, 0.2), (1.0, 1.5), (1.0, -0.1), (1.0, float("nan"))]


@pytest.mark.parametrize("probabilities", [*NO_PROBABILITIES, None, "ab", torch.ones(2, 2), np.ones((2, 2))], ids=str)
def test_probabilities_that_are_none_are_refused(probabilities: Any) -> None:
    with pytest.raises(ConfigError, match="`probabilities` must hold a number from 0 to 1 for each node, 2 in all"):
        DraftTree.chain(1, [2]).with_probabilities(probabilities)


def made(**fields: Any) -> DraftTree:
    """By the constructor: a root with two children, but for `fields`."""
    right: dict[str, Any] = {"tokens": (7, 1, 2), "parents": (-1, 0, 0), "depths": (0, 1, 1), "is_chain": False}
    return DraftTree(**{**right, **fields})


def test_a_tree_may_be_made_of_its_fields() -> None:
    tree = made()
    assert (tree.child(0, 1), tree.child(0, 2), tree.children(1)) == (1, 2, ())
    assert made(parents=(-1, 0, 1), depths=(0, 1, 2), is_chain=True) == DraftTree.chain(7, [1, 2])
    assert pickle.loads(pickle.dumps(tree)).children(0) == (1, 2)


INCONSISTENT: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"tokens": [7, 1, 2]}, "`tokens` must be a tuple with an entry for each node"),
    "no node": ({"tokens": (), "parents": (), "depths": ()}, "`tokens` must be a tuple with an entry"),
    "too few parents": ({"parents": (-1, 0)}, "`parents` must be a tuple with an entry for each node"),
    "too many depths": ({"depths": (0, 1, 1, 1)}, "`depths` must be a tuple with an entry for each node"),
    "no root": ({"parents": (0, 0, 0)}, "`parents` must begin with -1"),
    "a deep root": ({"depths": (1, 2, 2)}, "`depths` must begin with 0"),
    "a parent after it": ({"parents": (-1, 2, 0)}, r"`parents\[1\]` must be a node before it, 0 to 0, but is 2"),
    "a second root": ({"parents": (-1, 0, -1)}, r"`parents\[2\]` must be a node before it"),
    "a parent that is no number": ({"parents": (-1, 0, None)}, r"`parents\[2\]` must be a node before it"),
    "a wrong depth": ({"depths": (0, 1, 2)}, r"`depths\[2\]` must be 1, one more than its parent's, but is 2"),
    "a sibling's token": ({"tokens": (7, 1, 1)}, r"`tokens\[2\]` must differ from the tokens of its siblings"),
    "no token": ({"tokens": (7, 1, [2])}, r"`tokens\[2\]` must be a token id"),
    "no chain": ({"is_chain": True}, "`is_chain` must be False with these parents, but is True"),
    "probabilities": ({"probabilities": (1.0,)}, "`probabilities` must hold a number from 0 to 1 for each node, 3"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_fields_that_do_not_go_together_are_named(case: str) -> None:
    fields, message = INCONSISTENT[case]
    with pytest.raises(ConfigError, match=message) as error:
        made(**fields)
    assert error.value.remedy


NO_EXTRA: dict[str, tuple[tuple[Any, ...], str]] = {
    "a list": (([8], (1,), torch.ones(1, 2, dtype=torch.bool)), "`extra.tokens` must be a tuple"),
    "too few depths": (((8, 9), (1,), torch.ones(2, 3, dtype=torch.bool)), "`extra.depths` must be a tuple"),
    "no root": (((8, 9), (1, 1), torch.ones(2, 2, dtype=torch.bool)), r"`extra.visible` .* shape \(2, 3\) on the CPU"),
    "numbers": (((8,), (1,), torch.ones(1, 2)), "`extra.visible` must be a bool tensor"),
    "an array": (((8,), (1,), np.ones((1, 2), dtype=bool)), "`extra.visible` must be a bool tensor"),
}


@pytest.mark.parametrize("case", NO_EXTRA)
def test_extra_tokens_that_do_not_go_together_are_named(case: str) -> None:
    fields, message = NO_EXTRA[case]
    with pytest.raises(ConfigError, match=message):
        ExtraTokens(*fields)


@pytest.mark.parametrize("token", [[5], np.array(5), {}], ids=str)
def test_a_token_that_no_tree_can_hold_is_named(token: Any) -> None:
    with pytest.raises(ConfigError, match="`token` must be a token id"):
        TreeBuilder(7).add(0, token)
    with pytest.raises(ConfigError, match="`tokens` must be a list of token ids"):
        DraftTree.chain(7, [token])
