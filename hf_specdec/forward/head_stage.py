"""One decoder stack of a draft head over the pairs of all rows: its cache, and the columns of this round's tree.

A pair is a token of the text beside the state of the token before it. The cache holds the pairs of the text and is
never rebuilt: each round feeds the pairs of the tokens that were accepted, and forgets the columns that were drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.forward.head_base import head_cache
from hf_specdec.methods.draft_head import PairHead
from hf_specdec.transfer import to_device
from hf_specdec.tree import DraftTree

__all__ = ["HeadStage", "StageRow", "Wanted"]

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
        paths: columns of each node's path, the root's left out, counted from the round's first column.
        positions: of the round's columns; `-1` for padding.
        offset, num_written: where this round has written pairs of the text, and how many.
    """

    text: list[int]
    first: int = 0
    num_pairs: int = 0
    inputs: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    paths: dict[int, list[int]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    offset: int = 0
    num_written: int = 0

    def renew(self) -> None:
        """A new round."""
        self.states, self.paths, self.positions = {}, {0: []}, []
        self.offset = self.num_written = 0

    def read(self, states: torch.Tensor, after: int) -> None:
        """Take the states `(n, ...)` of the text's next tokens; the first time, the first of them has index `after`."""
        if not self.first:
            self.first = after + 1
        self.inputs.append(states)

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
    """What one row has to compute: its pending pairs, and then nodes of its tree beside their inputs.

    Attributes:
        nodes: below the root, parents before their children.
        inputs: `(hidden_size,)` the state that each node reads.
    """

    tree: DraftTree
    nodes: Sequence[int] = ()
    inputs: Sequence[torch.Tensor] = ()


class HeadStage:
    """One stage of a head with the pairs of all rows.

    Args:
        index: which stage of the head.
        texts: the rows' tokens.
        embed: token ids to embeddings, in the dtype and on the device of the head.
        reserve: columns to allocate at once.
        following: the stage that reads what this one computes for the text.
    """

    def __init__(
        self,
        head: PairHead,
        index: int,
        texts: Sequence[list[int]],
        embed: Callable[[torch.Tensor], torch.Tensor],
        *,
        reserve: int,
        following: "HeadStage | None" = None,
    ) -> None:
        self.head, self.index, self.embed, self.following = head, index, embed, following
        self.rows = [StageRow(text) for text in texts]
        self._cache = head_cache(head, head.cache_shapes(index), num_rows=len(texts), reserve=reserve)
        self._width = 0  # columns that this round has written
        self._renew()

    def catch_up(self, most: int) -> None:
        """Before a round writes anything, feed all but the last `most` pairs of long texts."""
        while not self._width and any(row.num_pending > most for row in self.rows):
            self._forward([row.take(most) if row.num_pending > most else None for row in self.rows])
            self.commit()

    def compute(self, wanted: Sequence[Wanted | None]) -> None:
        """One forward: of each row that wants anything, its pending pairs, and nodes of its tree after them."""
        pairs = [
            row.take() if want is not None and row.num_pending > 0 else None
            for row, want in zip(self.rows, wanted, strict=True)
        ]
        self._forward(pairs, wanted)

    def commit(self) -> None:
        """End the round: the pairs of the text that it has written stay, its nodes are forgotten."""
        self._cache.commit([range(row.offset, row.offset + row.num_written) for row in self.rows])
        for row in self.rows:
            row.num_pairs += row.num_written
        self._renew()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows."""
        self._cache.select(rows)
        self.rows = [self.rows[row] for row in rows]
        self._renew()

    def admit(self, other: "HeadStage", place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last."""
        self._cache.admit(other._cache, place)  # noqa: SLF001 another of the same class
        at = len(self.rows) if place is None else place
        self.rows[at : at + 1] = other.rows
        self._renew()

    def _renew(self) -> None:
        for row in self.rows:
            row.renew()
        self._width = 0

    def _forward(
        self,
        pairs: Sequence[tuple[list[int], torch.Tensor] | None],
        wanted: Sequence[Wanted | None] | None = None,
    ) -> None:
        """Compute pairs of the text and nodes below them, Q columns a row."""
        wants = wanted if wanted is not None else [None] * len(self.rows)
        counts = [0 if pair is None else len(pair[0]) for pair in pairs]
        width = max(count + len(want.nodes if want else ()) for count, want in zip(counts, wants, strict=True))
        if width == 0:
            return
        tokens = np.zeros((len(self.rows), width), dtype=np.int64)
        states = torch.zeros(
            (len(self.rows), width, self.head.hidden_size), dtype=self.head.dtype, device=self.head.device
        )
        mask = self._mask(width)
        for place, (row, pair, want) in enumerate(zip(self.rows, pairs, wants, strict=True)):
            positions: list[int] = []
            if pair is not None:
                self._place_pairs(place, pair, tokens, states, mask)
                start = row.first + row.num_pairs
                positions += range(start, start + counts[place])
                row.offset, row.num_written = self._width, counts[place]
            if want is not None and want.nodes:
                self._place_nodes(place, want, counts[place], tokens, states, mask)
                positions += [len(row.text) - 1 + want.tree.depths[node] for node in want.nodes]
            row.positions += positions + [-1] * (width - len(positions))
        computed = self._run(tokens, states, mask)
        for place, (row, count, want) in enumerate(zip(self.rows, counts, wants, strict=True)):
            if count:
                row.states[0] = computed[place, count - 1]
                if self.following is not None:
                    self.following.rows[place].read(computed[place, :count], row.first + row.num_pairs)
            if want is not None:
                row.states.update(zip(want.nodes, computed[place, count:], strict=False))

    def _place_pairs(
        self,
        place: int,
        pair: tuple[list[int], torch.Tensor],
        tokens: Array,
        states: torch.Tensor,
        mask: Array,
    ) -> None:
        """The next pairs of a row's text in its first new columns; each sees those before it."""
        ids, inputs = pair
        count, first = len(ids), self._starts[place] + self._width
        tokens[place, :count] = ids
        states[place, :count] = self.head.fuse(inputs) if self.index == 0 else inputs
        mask[place, 0, :count, first : first + count] = np.tri(count, dtype=np.bool_)

    def _place_nodes(
        self,
        place: int,
        want: Wanted,
        before: int,
        tokens: Array,
        states: torch.Tensor,
        mask: Array,
    ) -> None:
        """Nodes in the columns after `before` others; each sees the text, its path and itself."""
        row, start, count = self.rows[place], self._starts[place], len(want.nodes)
        columns = slice(before, before + count)
        tokens[place, columns] = [want.tree.tokens[node] for node in want.nodes]
        states[place, columns] = torch.stack(list(want.inputs))
        mask[place, 0, columns, start + row.offset : start + row.offset + row.num_written] = True
        for column, node in enumerate(want.nodes, start=before):
            path = [*row.paths.get(want.tree.parents[node], ()), self._width + column]
            row.paths[node] = path
            mask[place, 0, column, [start + seen for seen in path]] = True

    @property
    def _starts(self) -> tuple[int, ...]:
        """Pairs of each row in the cache, where its columns of this round begin."""
        return self._cache.lengths

    def _mask(self, width: int) -> Array:
        """`(rows, 1, width, K)` bool: everybody sees the text before this round, and itself."""
        starts = np.array(self._starts)[:, None, None, None]
        columns = np.arange(max(self._starts) + self._width + width)
        own = starts + self._width + np.arange(width)[:, None]
        visible: Array = (columns < starts) | (columns == own)
        return visible

    def _run(self, tokens: Array, states: torch.Tensor, mask: Array) -> torch.Tensor:
        """`(rows, Q, hidden_size)`."""
        head, width = self.head, tokens.shape[1]
        positions = np.array([row.positions[-width:] for row in self.rows]).clip(min=0)
        keys = [self._key_positions(mask.shape[-1])] if head.has_window else []
        ids, places, visible, *key_positions = to_device((tokens, positions, mask, *keys), head.device)
        computed: torch.Tensor = head(
            self.embed(ids),
            states,
            places,
            visible,
            self._cache,
            key_positions=key_positions[0] if keys else None,
            stage=self.index,
        )
        self._width += width
        return computed

    def _key_positions(self, total: int) -> Array:
        """`(rows, K)`: where each key stands in its text."""
        found = np.array([row.first for row in self.rows])[:, None] + np.arange(total)
        for row, start, own in zip(self.rows, self._starts, found, strict=True):
            own[start : start + len(row.positions)] = row.positions
        return found
