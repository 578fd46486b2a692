"""The draft tree: what a drafter proposes and the target verifies in one forward.

Node 0 is the root, the last token of the text, whose key and value are not in the cache yet. Every other node is a
drafted token under its parent. A chain is a tree, and so is a root alone. Tokens that are computed along with the
tree but never accepted are its `extra`. Knows nothing about models or caches.

    builder = TreeBuilder(root=7)
    a = builder.add(0, 11)
    builder.add(a, 12)
    tree = builder.build()
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.common.tree.checks import Children, check_probabilities, children_of
from hf_specdec.errors import ConfigError

ANY_DEPTH = 2**31 - 1  # as deep as a tree may become


@dataclass(frozen=True, slots=True)
class ExtraTokens:
    """Tokens whose logits a drafter wants without drafting them, such as lookahead's window: E of them.

    They stand behind the tree's nodes in the forward, see the text before the root, and never enter the text.

    Attributes:
        tokens (`tuple[int, ...]`): token id of each.
        depths (`tuple[int, ...]`): position id = position of the root + depth.
        visible (`Tensor`): `(E, 1 + E)` bool, on the CPU: entry (i, 0) says that token i sees the root, entry
            (i, 1 + j) that it sees extra token j. Each sees itself.

    Raises:
        ConfigError: the fields do not go together.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    visible: torch.Tensor

    def __post_init__(self) -> None:
        for name, values in (("tokens", self.tokens), ("depths", self.depths)):
            if not isinstance(values, tuple) or len(values) != len(self.tokens):
                rule = "must be a tuple with an entry for each extra token"
                raise ConfigError(f"extra.{name}", rule, values, "Write tuple(values).")
        seen, shape = self.visible, (len(self.tokens), 1 + len(self.tokens))
        is_tensor = isinstance(seen, torch.Tensor)
        if not is_tensor or (seen.shape, seen.dtype, seen.device.type) != (shape, torch.bool, "cpu"):
            shown = f"{seen.dtype} of shape {tuple(seen.shape)} on {seen.device}" if is_tensor else seen
            remedy = "Its first column is the root's, the others are those of the extra tokens."
            raise ConfigError("extra.visible", f"must be a bool tensor of shape {shape} on the CPU", shown, remedy)

    def __len__(self) -> int:
        """Number of tokens E."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens, parents and depths of T nodes, parents before children. Build one with `TreeBuilder` or `chain`.

    Raises:
        ConfigError: the fields do not go together, or `probabilities` are none of these nodes.

    Attributes:
        tokens (`tuple[int, ...]`): token id of each node; `tokens[0]` is the last token of the text.
        parents (`tuple[int, ...]`): index of each node's parent; -1 for the root.
        depths (`tuple[int, ...]`): distance from the root; position id of a node = position of the root + depth.
        is_chain (`bool`): whether every node is the child of the node before it.
        extra (`ExtraTokens | None`): tokens computed along with the tree.
        drafted_from (`Mapping[int, Tensor] | None`): for each node of a drawn chain but the last, `(vocab_size,)` the
            distribution that its child was drawn from; `None` where nothing was drawn.
        probabilities (`tuple[float, ...] | None`): of each node, that the target accepts it and all before it, as its
            drafter estimates. As proposed, nodes then stand in the order of their probabilities.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    is_chain: bool
    # `None` for nodes that are known to be right, until they are asked for.
    _children: Children | None = field(default=(), repr=False, compare=False)
    extra: ExtraTokens | None = field(default=None, repr=False, compare=False)
    drafted_from: Mapping[int, torch.Tensor] | None = field(default=None, repr=False, compare=False)
    probabilities: tuple[float, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._children == ():
            children = children_of(self.tokens, self.parents, self.depths, self.is_chain)
            object.__setattr__(self, "_children", children)
            if self.probabilities is not None:
                check_probabilities(self.probabilities, len(children))

    @classmethod
    def chain(cls, root: int, tokens: Iterable[int] = ()) -> "DraftTree":
        """A tree with a single branch.

        Args:
            root (`int`): id of the last token of the text.
            tokens (`Iterable[int]`, *optional*): drafted ids, in order.

        Raises:
            ConfigError: `tokens` is no iterable of numbers.
        """
        try:
            nodes = (root, *tokens)
            count = len(nodes)
            children = tuple([{nodes[node]: node} for node in range(1, count)]) + ({},)
        except TypeError as error:
            remedy = "Write [] for none, and tokens.tolist() for those of a tensor."
            raise ConfigError("tokens", "must be a list of token ids", tokens, remedy) from error
        return cls(nodes, tuple(range(-1, count - 1)), tuple(range(count)), True, children)

    @classmethod
    def of_nodes(
        cls,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        depths: tuple[int, ...],
        probabilities: tuple[float, ...] | None = None,
    ) -> "DraftTree":
        """The tree of these nodes, each after its parent; they are not checked."""
        is_chain = parents == tuple(range(-1, len(parents) - 1))
        return cls(tokens, parents, depths, is_chain, None, probabilities=probabilities)

    @property
    def _below(self) -> Children:
        """Children of each node by their tokens, in order."""
        if self._children is None:
            children: Children = tuple([{} for _ in self.tokens])
            for node in range(1, len(self.tokens)):
                children[self.parents[node]][self.tokens[node]] = node
            object.__setattr__(self, "_children", children)
        return self._children or ()

    def __len__(self) -> int:
        """Number of nodes T, the root counted."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted tokens, T - 1."""
        return len(self.tokens) - 1

    @property
    def num_columns(self) -> int:
        """Tokens of the forward, nodes and extra ones."""
        return len(self.tokens) + (len(self.extra) if self.extra is not None else 0)

    @property
    def column_tokens(self) -> tuple[int, ...]:
        """Token ids of the forward, the nodes' and then the extra ones."""
        return self.tokens if self.extra is None else self.tokens + self.extra.tokens

    @property
    def column_depths(self) -> tuple[int, ...]:
        """Depths of the forward's tokens, the nodes' and then the extra ones."""
        return self.depths if self.extra is None else self.depths + self.extra.depths

    def with_extra(self, extra: ExtraTokens | None) -> "DraftTree":
        """The same tree with other tokens next to it."""
        return replace(self, extra=extra)

    def with_probabilities(self, probabilities: tuple[float, ...]) -> "DraftTree":
        """The same tree with an estimate for each node.

        Raises:
            ConfigError: there are more or fewer than nodes, or one is no probability.
        """
        check_probabilities(probabilities, len(self.tokens))
        return replace(self, probabilities=probabilities)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        return self._below[node].get(token)

    def children(self, node: int) -> Sequence[int]:
        """The children of `node`, first added first."""
        return tuple(self._below[node].values())

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def nodes_in(self, other: "DraftTree") -> list[int | None]:
        """For each node, the node of `other` with the same tokens from the root on; `None` where there is none."""
        nodes: list[int | None] = [0]
        for node in range(1, len(self.tokens)):
            above = nodes[self.parents[node]]
            nodes.append(None if above is None else other.child(above, self.tokens[node]))
        return nodes

    def first_branch(self) -> list[int]:
        """Tokens of the branch that takes the first child of every node, the root left out."""
        return [self.tokens[node] for node in self._first_path()[1:]]

    def chained(self) -> "DraftTree":
        """The first branch alone, for models that verify chains."""
        return self if self.is_chain else replace(self.with_nodes(self._first_path()), extra=None)

    def first_branch_first(self) -> "DraftTree":
        """The same tree, its first branch as nodes 1, 2, ...: where that is accepted, nothing moves in a cache."""
        if self.is_chain:
            return self
        branch = self._first_path()
        if branch[-1] == len(branch) - 1:
            return self
        on_branch = set(branch)
        return self.with_nodes(branch + [node for node in range(1, len(self.tokens)) if node not in on_branch])

    def truncated(
        self, *, max_depth: int | None = None, max_nodes: int | None = None, vocab_size: int | None = None
    ) -> "DraftTree":
        """The same tree without nodes that are deeper than `max_depth`, come after `max_nodes` drafted ones, or hold a
        token that is not below `vocab_size`; what hangs below such a node goes with it. Extra tokens stay.
        """
        deepest = len(self.tokens) - 1 if self.is_chain else max(self.depths)
        keep_depth = max_depth is None or deepest <= max_depth
        keep_tokens = vocab_size is None or max(self.tokens) < vocab_size
        if keep_depth and keep_tokens:
            if max_nodes is None or self.num_draft_tokens <= max_nodes:
                return self
            return self._beginning(max_nodes + 1)
        kept, keeps = [0], [True] + [False] * (len(self.tokens) - 1)
        for node in range(1, len(self.tokens)):
            if max_nodes is not None and len(kept) > max_nodes:
                break
            fits = max_depth is None or self.depths[node] <= max_depth
            is_token = vocab_size is None or self.tokens[node] < vocab_size
            if keeps[self.parents[node]] and fits and is_token:
                keeps[node] = True
                kept.append(node)
        return self.with_nodes(kept)

    def _first_path(self) -> list[int]:
        """Nodes of the branch that takes the first child of every node, the root first."""
        path, last = [0], 0
        for node, parent in enumerate(self.parents):
            if parent == last and node:
                path.append(node)
                last = node
        return path

    def _beginning(self, length: int) -> "DraftTree":
        """The first `length` nodes."""
        parents, probabilities = self.parents[:length], self.probabilities
        return DraftTree(
            self.tokens[:length],
            parents,
            self.depths[:length],
            self.is_chain or parents == tuple(range(-1, length - 1)),
            None,
            self.extra,
            None if self.drafted_from is None else {n: row for n, row in self.drafted_from.items() if n < length},
            None if probabilities is None else probabilities[:length],
        )

    def with_nodes(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of these nodes in this order, each after its parent."""
        new = {node: place for place, node in enumerate(nodes)}
        parents = tuple([new.get(self.parents[node], -1) for node in nodes])
        probabilities = self.probabilities
        return DraftTree(
            tuple([self.tokens[node] for node in nodes]),
            parents,
            tuple([self.depths[node] for node in nodes]),
            parents == tuple(range(-1, len(nodes) - 1)),
            None,
            self.extra,
            None if self.drafted_from is None else {new[n]: row for n, row in self.drafted_from.items() if n in new},
            None if probabilities is None else tuple([probabilities[node] for node in nodes]),
        )

    def visible(self) -> torch.Tensor:
        """`(C, C)` bool over the forward's C tokens, on the CPU: entry (i, j) says that token i may see token j.

        A node sees itself and its ancestors; extra tokens see what `ExtraTokens.visible` says.
        """
        return torch.from_numpy(self.visible_array())

    def visible_array(self, width: int | None = None) -> npt.NDArray[np.bool_]:
        """`visible` as a NumPy array.

        Args:
            width (`int`, *optional*, defaults to C): rows and columns of a tree without extra tokens; those added see
                what the last one sees.
        """
        num_nodes, rows = len(self.tokens), list[bytearray]()
        width = width or self.num_columns
        for node, parent in enumerate(self.parents):
            row = bytearray(width) if parent < 0 else rows[parent][:]
            row[node] = 1
            rows.append(row)
        rows += rows[-1:] * (width - num_nodes)
        mask = np.frombuffer(bytearray().join(rows), dtype=np.bool_).reshape(width, width)
        if self.extra is not None:
            visible = self.extra.visible.numpy()
            mask[num_nodes:] = False
            mask[num_nodes:, 0], mask[num_nodes:, num_nodes:] = visible[:, 0], visible[:, 1:]
        return mask
