"""Builds a draft tree node by node."""

from collections.abc import Iterable

import numpy as np

from hf_specdec.common.tree.draft_tree import DraftTree
from hf_specdec.errors import ConfigError


class TreeBuilder:
    """Grows a tree node by node; a token that the parent already has as a child is not added twice.

    Args:
        root (`int`): id of the last token of the text; it is node 0.
    """

    def __init__(self, root: int) -> None:
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        """Number of nodes so far, the root counted."""
        return len(self._tokens)

    def add(self, parent: int, token: int) -> int:
        """Index of the child of `parent` with `token`, added if it is not there.

        Args:
            parent (`int`): index of a node.
            token (`int`): a token id.

        Raises:
            ConfigError: there is no such node, or `token` is no number.
        """
        try:
            child = self._children[parent if parent >= 0 else len(self)].get(token)
        except (IndexError, TypeError) as error:
            raise _no_child(parent, token, len(self)) from error
        if child is not None:
            return child
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._children[parent][token] = node
        self._children.append({})
        return node

    def add_path(self, parent: int, tokens: Iterable[int]) -> int:
        """Add `tokens` one under the other below `parent`; returns the last node.

        Raises:
            ConfigError: there is no such node, or `tokens` is no iterable of numbers.
        """
        try:
            for token in tokens:
                parent = self.add(parent, token)
        except TypeError as error:
            raise ConfigError("tokens", "must be a list of token ids", tokens, "Write [] for none.") from error
        return parent

    def build(self) -> DraftTree:
        """The finished tree."""
        return DraftTree.of_nodes(tuple(self._tokens), tuple(self._parents), tuple(self._depths))


def _no_child(parent: object, token: object, num_nodes: int) -> ConfigError:
    """The error for a child that a tree of so many nodes cannot get."""
    if isinstance(parent, int | np.integer) and 0 <= parent < num_nodes:
        return ConfigError("token", "must be a token id", token, "Write int(token) for a NumPy array of one.")
    remedy = "Pass 0, the root, or what add returned."
    return ConfigError("parent", f"must be a node, 0 to {num_nodes - 1}", parent, remedy)
