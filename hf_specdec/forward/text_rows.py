"""Texts of a runner's rows: the tokens, what the cache holds of each, and the columns that forwards write after it.

Columns are: known tokens that the cache lacks yet (`pending`), the tree's nodes, its extra tokens, and padding where
another row of the batch has more. A tree may grow between forwards; then only its new nodes are written.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.common.tree import DraftTree

MAX_UNWRITTEN = 32  # tokens that the tensor may lack where somebody brings them himself


class TokenBuffer:
    """Prompt and emitted tokens. The tensor is written only when somebody asks for it."""

    def __init__(self, input_ids: torch.Tensor, *, room: int) -> None:
        """`input_ids` is `(1, prompt_length)` of any integer type; `room` is the number of tokens expected."""
        self._buffer = torch.empty((1, input_ids.shape[1] + max(room, 1)), dtype=torch.long, device=input_ids.device)
        self._buffer[:, : input_ids.shape[1]] = input_ids
        self._written = input_ids.shape[1]
        self.tokens: list[int] = input_ids[0].tolist()
        self.prompt_length = len(self.tokens)

    def __len__(self) -> int:
        """Tokens so far, the prompt counted."""
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add an emitted token."""
        self.tokens.append(token)

    def ids(self) -> torch.Tensor:
        """The text as `(1, length)`: a view that later tokens do not change."""
        length = len(self.tokens)
        if length > self._buffer.shape[1]:
            grown = self._buffer.new_empty((1, 2 * length))
            grown[:, : self._written] = self._buffer[:, : self._written]
            self._buffer = grown
        if self._written < length:
            new = self.tokens[self._written :]
            if len(new) == 1:
                self._buffer[:, self._written : length].fill_(new[0])  # without a copy from the host
            else:
                self._buffer[0, self._written : length] = self._buffer.new_tensor(new)
            self._written = length
        return self._buffer[:, :length]

    def beginning(self, length: int) -> torch.Tensor:
        """`(1, length)`: its first tokens, and zeros after its last one."""
        ids = self.ids()[:, :length]
        return torch.nn.functional.pad(ids, (0, length - ids.shape[1]))

    def parts(self) -> tuple[torch.Tensor, list[int]]:
        """The text as `(1, L)` ids and the tokens after them, at most `MAX_UNWRITTEN`, for who brings those himself."""
        if len(self.tokens) - self._written > MAX_UNWRITTEN:
            return self.ids(), []
        return self._buffer[:, : self._written], self.tokens[self._written :]


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

    def columns_of(self, path: Sequence[int]) -> list[int]:
        """Columns that hold the text once the nodes in `path` are part of it."""
        if not self.node_columns:
            return []
        return [*range(len(self.pending)), *(self.node_columns[node] for node in path)]


class TextRows:
    """Rows of one call; they grow while it runs.

    Attributes:
        texts: one a row; the caller appends to them.
        num_cached: tokens of each text in the cache, once the prompt is.
        layouts: columns of each row since the last commit; none right after it.
    """

    def __init__(self, texts: Sequence[TokenBuffer]) -> None:
        self.texts, self.num_cached = list(texts), [len(text) for text in texts]
        self.layouts: list[TreeLayout] = []

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_uncached(self) -> list[int]:
        """Tokens that the cache lacks of each text in front of its root."""
        return [max(len(text) - 1 - count, 0) for text, count in zip(self.texts, self.num_cached, strict=True)]

    def uncached(self, most: int | None = None, end: int = -1) -> list[list[int]]:
        """Tokens that the cache lacks of each text up to `end`, by default its root; the first `most` of them."""
        rows = [text.tokens[count:end] for text, count in zip(self.texts, self.num_cached, strict=True)]
        return [row[:most] for row in rows]

    def begin(self, tokens: Sequence[Sequence[int]]) -> None:
        """Begin columns, with these tokens of each row first."""
        self.layouts = [TreeLayout(row) for row in tokens]

    def write(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """Write trees into the columns; returns the tokens of each row that are to be computed."""
        for layout, tree in zip(self.layouts, trees, strict=True):
            layout.write(tree)
        return [len(layout.new_tokens) for layout in self.layouts]

    def commit(self, kept: Sequence[int]) -> None:
        """Count these tokens of each row as cached, and forget the columns."""
        self.num_cached = [before + count for before, count in zip(self.num_cached, kept, strict=True)]
        self.layouts = []

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.texts = [self.texts[row] for row in rows]
        self.num_cached = [self.num_cached[row] for row in rows]

    def admit(self, other: "TextRows", row: int | None) -> None:
        """Take over the one row of `other`, in the place of `row` or after the last."""
        at = len(self) if row is None else row
        self.texts[at : at + 1], self.num_cached[at : at + 1] = other.texts, other.num_cached
