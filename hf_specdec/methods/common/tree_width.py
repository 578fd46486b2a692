"""Widths of the trees of a batch: every row of a forward is as wide as the widest, so rows decide together.

at_common_width([tree, other], [0.1, 0.1])      # trees that say how probable their nodes are
"""

from collections.abc import Sequence
from itertools import zip_longest

from hf_specdec.common.tree import DraftTree


def at_common_width(trees: Sequence[DraftTree], min_probabilities: Sequence[float]) -> list[DraftTree]:
    """The trees without what is not worth its time, each row's first branch in front.

    A node more a row takes time of every row, so of the nodes at one place in their trees the sum of the
    probabilities has to reach that of the rows' bounds. Trees that do not say how probable their nodes are stay.

    Args:
        min_probabilities: of each row, the probability of acceptance that is worth a drafted node's time; 0.0 where the
            row needs none.
    """
    estimates = [tree.probabilities[1:] for tree in trees if tree.probabilities is not None]
    bound = sum(min_probabilities)
    best, best_gain, gain = 0, 0.0, 0.0
    for width, column in enumerate(zip_longest(*estimates, fillvalue=0.0), 1):
        gain += sum(column) - bound
        if gain >= best_gain:
            best, best_gain = width, gain
    return [
        tree if tree.probabilities is None else tree.truncated(max_nodes=best).first_branch_first() for tree in trees
    ]
