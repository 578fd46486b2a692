"""A budget next to trees of other methods, which it does not cut."""

from hf_specdec.common.tree import DraftTree
from tests.engine.test_budget import FLAT, STEEP, budget_of, chain


def test_columns_that_other_methods_need_anyway_cost_nothing() -> None:
    """A forward is as wide as its widest row."""
    (tree,) = budget_of(STEEP, rows=2).cut([chain(0.3, 0.2, 0.1, 0.05)], 2, [DraftTree.chain(1, range(2, 5))])
    assert len(tree) == 4


def test_other_methods_keep_no_tree_small() -> None:
    (tree,) = budget_of(FLAT, rows=2).cut([chain(0.3, 0.2, 0.1, 0.05)], 2, [DraftTree.chain(1, [2])])
    assert len(tree) == 5
