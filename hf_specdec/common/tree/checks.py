"""Checks a drafter's tree: its nodes and their probabilities.

Trees that this package makes are not checked. Knows nothing of trees but their fields.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hf_specdec.errors import ConfigError

Children = tuple[dict[int, int], ...]


def children_of(tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int], is_chain: bool) -> Children:
    """The nodes below each node by their tokens, in order.

    Raises:
        ConfigError: these are no nodes of one tree.
    """
    fields = {"tokens": tokens, "parents": parents, "depths": depths}
    for name, values in fields.items():
        if not isinstance(values, tuple) or not values or len(values) != len(tokens):
            remedy = "Build the tree with TreeBuilder or DraftTree.chain."
            raise ConfigError(name, "must be a tuple with an entry for each node, the root first", values, remedy)
    children: Children = tuple([{} for _ in tokens])
    _check(parents[0] == -1, "parents", "must begin with -1, for the root", parents)
    _check(depths[0] == 0, "depths", "must begin with 0, for the root", depths)
    for node in range(1, len(tokens)):
        parent, token = parents[node], tokens[node]
        is_before = isinstance(parent, int | np.integer) and 0 <= parent < node
        _check(is_before, f"parents[{node}]", f"must be a node before it, 0 to {node - 1}", parent)
        deeper = depths[parent] + 1
        _check(depths[node] == deeper, f"depths[{node}]", f"must be {deeper}, one more than its parent's", depths[node])
        try:
            is_new = token not in children[parent]
        except TypeError as error:
            raise ConfigError(f"tokens[{node}]", "must be a token id", token, "Write int(token).") from error
        _check(is_new, f"tokens[{node}]", "must differ from the tokens of its siblings", token)
        children[parent][token] = node
    in_sequence = all(after - before == 1 for before, after in pairwise(parents))
    _check(is_chain is in_sequence, "is_chain", f"must be {in_sequence} with these parents", is_chain)
    return children


def _check(holds: bool, field: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(field, rule, value, "TreeBuilder and DraftTree.chain fill in all but the tokens.")


def check_probabilities(probabilities: Sequence[float], num_nodes: int) -> None:
    """Raise `ConfigError` where there are more or fewer than nodes, or one is no probability."""
    try:
        fits = len(probabilities) == num_nodes and all(0.0 <= probability <= 1.0 for probability in probabilities)
    except (TypeError, ValueError, RuntimeError):  # no sequence, or not of numbers
        fits = False
    if not fits:
        rule = f"must hold a number from 0 to 1 for each node, {num_nodes} in all"
        raise ConfigError("probabilities", rule, probabilities, "Begin with 1.0 for the root.")
