"""The columns that forwards write for one row between two commits, and where each node of its tree stands.

Columns are: known tokens that the cache lacks yet (`pending`), the tree's nodes, its extra tokens, and padding where
another row of the batch has more. A tree may grow between forwards; then only its new nodes are written.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hf_specdec.common.tree import DraftTree


class TreeLayout:
    """One row's columns since its last commit.

    Attributes:
        new_tokens, new_depths (`list[int]`): of the columns that the next forward writes; depths count from the first
            column, so that position id = tokens in the cache + depth.
        first_new (`int`): columns that earlier forwards have written.
        tree (`DraftTree | None`): the tree as it was written last.
        node_columns (`list[int]`): column of each node of the tree, then of each extra token.
        is_chain (`bool`): whether every column sees all those before it, padding left aside.
    """

    def __init__(self, pending: Sequence[int]) -> None:
        self.pending = list(pending)
        self.new_tokens: list[int] = []
        self.new_depths: list[int] = []
        self.depths: list[int] = []
        self.first_new = 0
        self.node_columns: list[int] = []
        self.is_chain = True
        self.tree: DraftTree | None = None
        self._first_node = 0

    def __len__(self) -> int:
        """Columns in all, those of earlier forwards counted."""
        return self.first_new + len(self.new_tokens)

    def write(self, tree: DraftTree | None) -> None:
        """Set what the next forward computes: the nodes of `tree` that are not written yet, or nothing."""
        self.first_new += len(self.new_tokens)
        self.new_tokens, self.new_depths = [], []
        self._first_node = len(self.node_columns)
        if tree is None:
            return
        self.tree = tree
        if self._first_node == 0:
            self.new_tokens = self.pending.copy()
            self.new_depths = list(range(len(self.pending)))
        start, num_pending = len(self), len(self.pending)
        self.new_tokens += tree.column_tokens[self._first_node :]
        self.new_depths += [num_pending + depth for depth in tree.column_depths[self._first_node :]]
        self.node_columns += range(start, start + tree.num_columns - self._first_node)
        self.is_chain = (
            tree.is_chain
            and tree.extra is None
            and self.node_columns[-1] == num_pending + len(self.node_columns) - 1  # nothing is between them
        )
        self.depths += self.new_depths

    def pad(self, num_new: int) -> None:
        """Widen the next forward to `num_new` columns; the added ones repeat the last token and see what it sees."""
        missing = num_new - len(self.new_tokens)
        if not missing:
            return
        filler = self.new_tokens[-1] if self.new_tokens else 0
        depth = self.new_depths[-1] if self.new_depths else 0
        self.new_tokens += [filler] * missing
        self.new_depths += [depth] * missing
        self.depths += [depth] * missing

    @property
    def new_rows(self) -> slice:
        """Indices of the tree's new nodes and extra tokens among the next forward's rows of logits."""
        count = len(self.node_columns) - self._first_node
        start = self.node_columns[self._first_node] - self.first_new if count else 0
        return slice(start, start + count)

    def visible(self) -> npt.NDArray[np.bool_]:
        """`(new, C)` bool: which columns each new column sees."""
        total, num_pending = len(self), len(self.pending)
        whole = None if num_pending or self.first_new else self.tree
        if whole is not None and (whole.extra is None or total == whole.num_columns):
            return whole.visible_array(total)
        mask = np.zeros((total - self.first_new, total), dtype=np.bool_)
        mask.reshape(-1)[self.first_new :: total + 1] = True  # itself
        rows = self.new_rows
        if rows.start == rows.stop:
            return mask
        assert self.tree is not None
        if num_pending:
            if not self.first_new:
                mask[:num_pending, :num_pending] = np.tri(num_pending, dtype=np.bool_)
            mask[rows, :num_pending] = True
        block = self.tree.visible_array()[self._first_node :]
        first, last = self.node_columns[0], self.node_columns[-1]
        if last - first == len(self.node_columns) - 1:
            mask[rows, first : last + 1] = block
        else:
            mask[rows, self.node_columns] = block
        mask[rows.stop :] = mask[rows.stop - 1]
        return mask

    def column_of(self, node: int) -> int:
        """Index of a node among the next forward's columns."""
        return self.node_columns[node] - self.first_new

    def columns_of(self, path: Sequence[int]) -> list[int]:
        """Columns that hold the text once the nodes in `path` are part of it."""
        if not self.node_columns:
            return []
        return [*range(len(self.pending)), *(self.node_columns[node] for node in path)]
