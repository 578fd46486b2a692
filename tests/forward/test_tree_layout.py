"""Where a row's columns stand between two commits: against a slow reading of the same rules."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_specdec.common.tree import DraftTree, ExtraTokens, TreeBuilder
from hf_specdec.forward.text_rows import TreeLayout


def grown(builder: TreeBuilder, rng: random.Random, count: int) -> DraftTree:
    for _ in range(count):
        builder.add(rng.randrange(len(builder)), rng.randrange(50))
    return builder.build()


def visible_by_hand(
    pending: Sequence[int], tree: DraftTree, columns: Sequence[int], total: int
) -> npt.NDArray[np.bool_]:
    """`(total, total)`: pending tokens see those before them; nodes see all pending ones and their ancestors."""
    mask = np.eye(total, dtype=np.bool_)
    for column in range(len(pending)):
        mask[column, : column + 1] = True
    for node in range(len(tree)):
        mask[columns[node], : len(pending)] = True
        for ancestor in tree.path(node):
            mask[columns[node], columns[ancestor]] = True
    return mask


@pytest.mark.parametrize("seed", range(12))
def test_growing_trees_see_pending_tokens_and_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    pending = [90 + i for i in range(rng.randrange(4))]
    layout, builder = TreeLayout(pending), TreeBuilder(7)
    for step in range(3):
        first = len(layout)
        tree = grown(builder, rng, rng.randrange(1, 5))
        layout.write(tree)
        layout.pad(len(layout.new_tokens) + rng.randrange(3))
        rows = layout.visible()
        expected = visible_by_hand(pending, tree, layout.node_columns, len(layout))[first:]
        assert np.array_equal(rows[layout.new_rows], expected[layout.new_rows])
        assert rows.shape == (len(layout) - first, len(layout))
        if step == 0:
            assert layout.new_tokens[: len(pending)] == pending
            assert np.array_equal(rows[: len(pending)], expected[: len(pending)])
        tokens = dict(zip(range(first, len(layout)), layout.new_tokens, strict=True))
        assert all(tokens.get(c, tree.tokens[n]) == tree.tokens[n] for n, c in enumerate(layout.node_columns))
        assert [layout.depths[c] for c in layout.node_columns] == [len(pending) + depth for depth in tree.depths]
        node = rng.randrange(len(tree))
        path = tree.path(node)
        kept = layout.columns_of(path)
        assert kept == [*range(len(pending)), *(layout.node_columns[n] for n in path)]


def test_a_chain_is_one_until_padding_or_a_sibling_lies_between() -> None:
    layout = TreeLayout([1])
    layout.write(DraftTree.chain(2, [3]))
    assert layout.is_chain
    layout.pad(5)
    assert layout.is_chain, "padding at the end is seen by no one"
    layout.write(DraftTree.chain(2, [3, 4]))
    assert not layout.is_chain
    fork = TreeBuilder(2)
    fork.add(0, 3), fork.add(0, 4)
    other = TreeLayout([])
    other.write(fork.build())
    assert not other.is_chain


def test_extra_tokens_come_after_the_nodes_and_see_what_they_say() -> None:
    extra = ExtraTokens((8, 9), (1, 2), torch.tensor([[True, True, False], [True, True, True]]))
    layout = TreeLayout([5])
    layout.write(DraftTree.chain(6, [7]).with_extra(extra))
    assert layout.new_tokens == [5, 6, 7, 8, 9]
    assert layout.new_depths == [0, 1, 2, 2, 3]
    assert layout.new_rows == slice(1, 5)
    assert layout.visible().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
