"""Checks a drafter's tree: its nodes, their probabilities, and the distributions they were drawn from.

Trees that this package makes are not checked. Knows nothing of trees but their fields.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from hf_specdec.errors import ConfigError

Children = tuple[dict[int, int], ...]
SUM_TOLERANCE = 0.01  # what rounding to bf16 can do to a sum


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


def no_child(parent: object, token: object, num_nodes: int) -> ConfigError:
    """The error for a child that a tree of so many nodes cannot get."""
    if isinstance(parent, int | np.integer) and 0 <= parent < num_nodes:
        return ConfigError("token", "must be a token id", token, "Write int(token) for a NumPy array of one.")
    remedy = "Pass 0, the root, or what add returned."
    return ConfigError("parent", f"must be a node, 0 to {num_nodes - 1}", parent, remedy)


def check_probabilities(probabilities: Sequence[float], num_nodes: int) -> None:
    """Raise `ConfigError` where there are more or fewer than nodes, or one is no probability."""
    try:
        fits = len(probabilities) == num_nodes and all(0.0 <= probability <= 1.0 for probability in probabilities)
    except (TypeError, ValueError, RuntimeError):  # no sequence, or not of numbers
        fits = False
    if not fits:
        rule = f"must hold a number from 0 to 1 for each node, {num_nodes} in all"
        raise ConfigError("probabilities", rule, probabilities, "Begin with 1.0 for the root.")


def check_distributions(drafted_from: Mapping[int, torch.Tensor], children: Sequence[Collection[int]]) -> None:
    """Raise `ConfigError` where a node has no distribution that its children could be drawn from.

    Args:
        children: of each node the tokens below it.
    """
    if not isinstance(drafted_from, Mapping):
        remedy = "Write {node: probabilities}, with logits.softmax(dim=-1) for the probabilities."
        raise ConfigError("drafted_from", "must be a dict of tensors by node", drafted_from, remedy)
    width: int | None = None
    for node, row in drafted_from.items():
        if not isinstance(node, int) or not 0 <= node < len(children):
            rule = f"must have nodes as keys, 0 to {len(children) - 1}"
            raise ConfigError("drafted_from", rule, node, "Name the node that the tokens were drafted below.")
        name = f"drafted_from[{node}]"
        if not isinstance(row, torch.Tensor) or row.ndim != 1 or not row.is_floating_point():
            shown = f"{row.dtype} of shape {tuple(row.shape)}" if isinstance(row, torch.Tensor) else row
            rule = "must be a tensor of one dimension and a floating dtype"
            raise ConfigError(name, rule, shown, "Write logits[row].softmax(dim=-1).")
        width = len(row) if width is None else width
        if len(row) != width or len(row) <= max(children[node], default=0):
            rule = "must have a probability for each token of the vocabulary, as those of the other nodes"
            raise ConfigError(name, rule, f"of {len(row)} tokens", "Set those that are never drawn to 0.0.")
        _check_numbers(name, row)


def _check_numbers(name: str, row: torch.Tensor) -> None:
    least, total = torch.stack([row.min().float(), row.sum(dtype=torch.float32)]).tolist()
    if not (least >= 0.0 and abs(total - 1.0) <= SUM_TOLERANCE):
        shown = f"from {least:.3g} on, with the sum {total:.3g}"
        raise ConfigError(name, "must hold numbers from 0.0 on with the sum 1.0", shown, "Write row.softmax(dim=-1).")
