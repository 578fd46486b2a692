"""Texts of a runner's rows: what the cache holds of each, and the columns that are written after it."""

from collections.abc import Sequence

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.forward.tree_layout import TreeLayout


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
