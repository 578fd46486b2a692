"""State that a draft head's stage keeps of a row of texts, and the columns of one of its forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.common.tree import DraftTree

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class StageRow:
    """One row's pairs.

    Attributes:
        text: the row's tokens, without padding; the runner's own list.
        first: the token of the first pair, as its index in the text.
        num_pairs: pairs in the cache.
        inputs: `(n, ...)` states whose pairs are not in the cache yet, in order.
        states: `(hidden_size,)` after each node of this round's tree; the root's is the last pair's.
        logits: `(draft_vocab_size,)` after each node, where they come with the states.
        paths: columns of each node's path, the root's left out, counted from the round's first column.
        positions: of the round's columns; `-1` for padding.
        offset, num_written: where this round has written pairs of the text, and how many.
    """

    text: list[int]
    first: int = 0
    num_pairs: int = 0
    inputs: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    paths: dict[int, list[int]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    offset: int = 0
    num_written: int = 0

    def renew(self) -> None:
        """A new round."""
        self.states, self.logits, self.paths, self.positions = {}, {}, {0: []}, []
        self.offset = self.num_written = 0

    def read(self, states: torch.Tensor, after: int) -> None:
        """Take the states `(n, ...)` of the text's next tokens; the first time, the first of them has index `after`."""
        if not self.first:
            self.first = after + 1
        self.inputs.append(states)

    def skip(self, count: int) -> None:
        """Never feed the first `count` pairs; none has been fed."""
        self.inputs = [torch.cat(self.inputs)[count:]]
        self.first += count

    @property
    def num_pending(self) -> int:
        """Pairs of the text that are to be fed: their states are here, and so are their tokens."""
        unfed = len(self.text) - self.first - self.num_pairs - self.num_written
        return min(unfed, sum(map(len, self.inputs)))

    def take(self, most: int | None = None) -> tuple[list[int], torch.Tensor]:
        """Tokens and `(n, ...)` states of the next pairs; they count as taken."""
        count = self.num_pending if most is None else min(most, self.num_pending)
        start = self.first + self.num_pairs
        states = torch.cat(self.inputs) if len(self.inputs) > 1 else self.inputs[0]
        self.inputs = [states[count:]]
        return self.text[start : start + count], states[:count]


@dataclass(slots=True)
class Wanted:
    """Work of one row: its pending pairs, and then nodes of its tree with their inputs.

    Attributes:
        nodes: below the root, parents before their children.
        inputs: `(hidden_size,)` the state that each node reads.
    """

    tree: DraftTree
    nodes: Sequence[int] = ()
    inputs: Sequence[torch.Tensor] = ()


@dataclass(slots=True)
class Columns:
    """Inputs of one forward: Q columns a row, which see K keys.

    Attributes:
        tokens, positions: `(rows, Q)`; zeros in padding.
        states: `(rows, Q, hidden_size)` that they read.
        mask: `(rows, 1, Q, K)` bool.
        num_new (`int`): columns of the row that has most; those after it are padding in every row.
        is_fixed (`bool`): whether Q is one of few widths and K the length of the buffers.
    """

    tokens: Array
    positions: Array
    states: torch.Tensor
    mask: Array
    num_new: int
    is_fixed: bool

    @property
    def width(self) -> int:
        """Q."""
        return int(self.tokens.shape[1])

    @property
    def num_keys(self) -> int:
        """K."""
        return int(self.mask.shape[-1])
