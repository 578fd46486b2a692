"""Constraints: logits processors that know which tokens may come next, so that drafts follow them too.

A drafted token that the constraint forbids is left out before the forward. Where it allows one token only, that token
is drafted with probability 1, and so are those that follow from it: below the root, and below the drafter's leaves.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder


@runtime_checkable
class Constraint(Protocol):
    """A processor of one row that can be asked about drafted tokens. It is at one node of a tree at a time."""

    def follow(self, text: Sequence[int]) -> None:
        """Go to the end of the text, the prompt included."""

    def descend(self, path: Sequence[int]) -> bool:
        """Go to the node that `path` leads to from the text's end; returns whether all of its tokens are allowed."""

    def forced(self) -> list[int]:
        """Get the tokens that must follow here, as long as there is one alone that may."""

    def mask_nodes(self, scores: torch.Tensor, tree: DraftTree, text: Sequence[int]) -> torch.Tensor:
        """Get the scores `(T, vocab_size)` of all nodes of a tree below `text`, -inf where a token is forbidden."""


def constrained(tree: DraftTree, constraint: Constraint, text: Sequence[int]) -> DraftTree:
    """The tree without what the constraint forbids, and with what it forces.

    What siblings that are left out were thought to be worth goes to those that stay. Drawn children all stay, since
    whether one is verified must not depend on its value; where a token is forced below the root, it takes their place.
    """
    constraint.follow(text)
    run = constraint.forced()
    if len(tree) == 1:
        tree = tree.with_probabilities((1.0,))
    if tree.drafted_from is not None:
        return DraftTree.chain(tree.tokens[0], run) if run else tree
    runs, left_out = {0: run}, [0.0] * len(tree)  # of nodes that are allowed; the share of each node's other children
    for node, path in _depth_first(tree):
        parent = tree.parents[node]
        is_child = parent in runs and runs[parent][:1] in ([], [tree.tokens[node]])
        if is_child and constraint.descend(path):
            runs[node] = constraint.forced()
        elif tree.probabilities is not None and parent in runs:
            left_out[parent] += _share(tree.probabilities, node, parent)
    builder, chances = TreeBuilder(tree.tokens[0]), [1.0]
    builder.add_path(0, run)
    chances += [1.0] * len(run)
    places = {0: 0}
    for node in range(1, len(tree)):
        if node not in runs:
            continue
        parent = tree.parents[node]
        places[node] = builder.add(places[parent], tree.tokens[node])
        if len(chances) < len(builder):
            share = _share(tree.probabilities, node, parent)
            kept = 1.0 if runs[parent] else share / max(1.0 - left_out[parent], share) if share else 0.0
            chances.append(chances[places[parent]] * kept)
    parents = {tree.parents[node] for node in places}
    for node in places.keys() - parents:
        builder.add_path(places[node], runs[node])
        chances += [chances[places[node]]] * (len(builder) - len(chances))
    grown = builder.build().with_extra(tree.extra)
    if tree.probabilities is None:
        return grown
    order = sorted(range(len(grown)), key=lambda node: -chances[node])  # stable: a parent stays before its children
    return grown.with_probabilities(tuple(chances)).with_nodes(order)


def _depth_first(tree: DraftTree) -> Iterator[tuple[int, list[int]]]:
    """Every drafted node with the tokens that lead to it."""
    waiting = [(node, [tree.tokens[node]]) for node in reversed(tree.children(0))]
    while waiting:
        node, path = waiting.pop()
        yield node, path
        waiting += [(child, [*path, tree.tokens[child]]) for child in reversed(tree.children(node))]


def _share(probabilities: Sequence[float] | None, node: int, parent: int) -> float:
    """Probability of a node where its parent is accepted; 1 where nothing is known."""
    if probabilities is None:
        return 1.0
    return probabilities[node] / probabilities[parent] if probabilities[parent] else 0.0
