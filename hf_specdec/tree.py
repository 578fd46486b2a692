"""The draft tree: what a drafter proposes and the target verifies in one forward.

Node 0 is the root, the last token of the text, whose key and value are not in the cache yet. Every other node is a
drafted token under its parent. A chain is a tree, and so is a root alone. Knows nothing about models or caches.

    builder = TreeBuilder(root=7)
    a = builder.add(0, 11)
    builder.add(a, 12)
    tree = builder.build()
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["DraftTree", "TreeBuilder"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens, parents and depths of T nodes, parents before children. Build one with `TreeBuilder` or `chain`.

    Attributes:
        tokens (`tuple[int, ...]`): token id of each node; `tokens[0]` is the last token of the text.
        parents (`tuple[int, ...]`): index of each node's parent; -1 for the root.
        depths (`tuple[int, ...]`): distance from the root; position id of a node = position of the root + depth.
        is_chain (`bool`): whether every node is the child of the node before it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    is_chain: bool
    _children: tuple[dict[int, int], ...] = field(repr=False, compare=False)

    @classmethod
    def chain(cls, root: int, tokens: Iterable[int] = ()) -> "DraftTree":
        """A tree with a single branch: `root` followed by `tokens`."""
        nodes = (root, *tokens)
        count = len(nodes)
        children = tuple([{nodes[node]: node} for node in range(1, count)]) + ({},)
        return cls(nodes, tuple(range(-1, count - 1)), tuple(range(count)), True, children)

    def __len__(self) -> int:
        """Number of nodes T, the root counted."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted tokens: T - 1."""
        return len(self.tokens) - 1

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        return self._children[node].get(token)

    def children(self, node: int) -> Sequence[int]:
        """The children of `node`, first added first."""
        return tuple(self._children[node].values())

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def first_branch(self) -> list[int]:
        """Tokens of the branch that takes the first child of every node, the root left out."""
        tokens, node = [], 0
        while self._children[node]:
            node = next(iter(self._children[node].values()))
            tokens.append(self.tokens[node])
        return tokens

    def truncated(
        self, *, max_depth: int | None = None, max_nodes: int | None = None, vocab_size: int | None = None
    ) -> "DraftTree":
        """The same tree without nodes that are deeper than `max_depth`, come after `max_nodes` drafted ones, or hold a
        token that is not below `vocab_size`; what hangs below such a node goes with it."""
        deepest = len(self.tokens) - 1 if self.is_chain else max(self.depths)
        keep_depth = max_depth is None or deepest <= max_depth
        keep_tokens = vocab_size is None or max(self.tokens) < vocab_size
        if keep_depth and keep_tokens and (max_nodes is None or self.num_draft_tokens <= max_nodes):
            return self
        builder = TreeBuilder(self.tokens[0])
        new_index = {0: 0}
        for node in range(1, len(self.tokens)):
            if max_nodes is not None and len(new_index) > max_nodes:
                break
            parent = self.parents[node]
            fits = max_depth is None or self.depths[node] <= max_depth
            known = vocab_size is None or self.tokens[node] < vocab_size
            if parent in new_index and fits and known:
                new_index[node] = builder.add(new_index[parent], self.tokens[node])
        return builder.build()

    def ancestor_mask(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """`(T, T)` bool: entry (i, j) says that node j is node i or one of its ancestors."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = [False] * len(self.parents) if parent < 0 else rows[parent].copy()
            row[node] = True
            rows.append(row)
        return torch.tensor(rows, dtype=torch.bool, device=device)


class TreeBuilder:
    """Grows a tree node by node; a token that the parent already has as a child is not added twice."""

    def __init__(self, root: int) -> None:
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        """Number of nodes so far, the root counted."""
        return len(self._tokens)

    def add(self, parent: int, token: int) -> int:
        """Index of the child of `parent` with `token`, added if it is not there."""
        known = self._children[parent].get(token)
        if known is not None:
            return known
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._children[parent][token] = node
        self._children.append({})
        return node

    def add_path(self, parent: int, tokens: Iterable[int]) -> int:
        """Add `tokens` one under the other below `parent`; returns the last node."""
        for token in tokens:
            parent = self.add(parent, token)
        return parent

    def build(self) -> DraftTree:
        """The finished tree."""
        is_chain = all(parent == node - 1 for node, parent in enumerate(self._parents))
        return DraftTree(
            tuple(self._tokens),
            tuple(self._parents),
            tuple(self._depths),
            is_chain,
            tuple([{**c} for c in self._children]),
        )
