"""How wide the trees of a batch are: as wide as the rows gain from together."""

import random

import pytest

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.draft_scorer import at_common_width


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
