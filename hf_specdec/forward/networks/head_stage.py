"""One decoder stack of a draft head over the pairs of all rows: its cache, and the columns of this round's tree.

A pair is a token of the text with the state of the token before it. The cache holds the pairs of the text and is
never rebuilt: each round feeds the pairs of the tokens that were accepted, and forgets the columns that were drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.common.transfer import to_device
from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.compiled_forward import CompiledShapes, Step, StepKind
from hf_specdec.forward.networks.head_base import head_cache
from hf_specdec.methods.common.draft_head import PairHead

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


class HeadStage:
    """One stage of a head with the pairs of all rows.

    Args:
        index: which stage of the head.
        texts: the rows' tokens.
        embed: token ids to embeddings, in the dtype and on the device of the head.
        reserve: columns to allocate at once.
        following: the stage that reads what this one computes for the text.
        shapes: of all forwards but those that feed long texts, where these are compiled.
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
        shapes: CompiledShapes | None = None,
    ) -> None:
        self.head, self.index, self.embed, self.following = head, index, embed, following
        self._device, self._dtype = head.device, head.dtype
        self.rows = [StageRow(text) for text in texts]
        self._shapes, layers = shapes, head.cache_shapes(index)
        self._cache = head_cache(head, layers, shapes, num_rows=len(texts), reserve=reserve, part=index)
        self._width = 0  # columns that this round has written
        self._renew()

    def catch_up(self, most: int, wanted: Sequence[Wanted | None]) -> None:
        """Before a round writes anything, feed all but the last pairs of texts that `compute` could not feed at once.

        Args:
            most: pairs of a row that are fed at once.
            wanted: what is computed next.
        """
        limits = [self._most_pending(most, want) for want in wanted]
        while not self._width and any(row.num_pending > limit for row, limit in zip(self.rows, limits, strict=True)):
            self._forward(
                [
                    row.take(min(most, row.num_pending - 1)) if row.num_pending > limit else None
                    for row, limit in zip(self.rows, limits, strict=True)
                ]
            )
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

    def release(self) -> None:
        """Leave the buffers to the next call; nothing is computed any more."""
        if self._shapes is not None and isinstance(self._cache, StaticSpecCache):
            self._shapes.compiled.keep_cache(self._cache, self.index)

    def _renew(self) -> None:
        for row in self.rows:
            row.renew()
        self._width = 0

    def _most_pending(self, most: int, want: Wanted | None) -> int:
        """Pending pairs of a row that a forward has room for, besides the nodes that it computes."""
        if self._shapes is None or want is None:
            return most
        return max(self._shapes.fixed.widths[-1] - len(want.nodes), 1)

    def _forward(
        self,
        pairs: Sequence[tuple[list[int], torch.Tensor] | None],
        wanted: Sequence[Wanted | None] | None = None,
    ) -> None:
        """Compute pairs of the text and nodes below them; without `wanted`, pairs of long texts."""
        wants = wanted if wanted is not None else [None] * len(self.rows)
        counts = [0 if pair is None else len(pair[0]) for pair in pairs]
        num_new = max(count + len(want.nodes if want else ()) for count, want in zip(counts, wants, strict=True))
        if num_new == 0:
            return
        columns = self._columns(num_new, is_text=wanted is None)
        for place, (row, pair, want) in enumerate(zip(self.rows, pairs, wants, strict=True)):
            positions: list[int] = []
            if pair is not None:
                self._place_pairs(place, pair, columns)
                start = row.first + row.num_pairs
                positions += range(start, start + counts[place])
                row.offset, row.num_written = self._width, counts[place]
            if want is not None and want.nodes:
                self._place_nodes(place, want, counts[place], columns)
                positions += [len(row.text) - 1 + want.tree.depths[node] for node in want.nodes]
            columns.positions[place, : len(positions)] = positions
            row.positions += positions + [-1] * (num_new - len(positions))
        computed, logits = self._run(columns)
        for place, (row, count, want) in enumerate(zip(self.rows, counts, wants, strict=True)):
            nodes = [] if want is None else list(want.nodes)
            known, first = ([0, *nodes], count - 1) if count else (nodes, 0)  # the last pair is the root's
            row.states.update(zip(known, computed[place, first:], strict=False))
            if logits is not None:
                row.logits.update(zip(known, logits[place, first:], strict=False))
            if count and self.following is not None:
                self.following.rows[place].read(computed[place, :count], row.first + row.num_pairs)

    def _columns(self, num_new: int, *, is_text: bool) -> Columns:
        """Columns of a forward without tokens and states yet; each sees the text before this round, and itself.

        Over buffers of fixed shape there are as many as the least width has that holds them.

        Args:
            is_text: whether there are pairs alone, and nothing is written in this round.
        """
        cache, num_rows, width = self._cache, len(self.rows), num_new
        num_keys, is_fixed = max(self._starts) + self._width + num_new, False
        if self._shapes is not None and isinstance(cache, StaticSpecCache):
            if is_text:
                cache.unplace()
            else:
                width = self._shapes.fixed.width_of(num_new)
                cache.place(width, written=self._width)
                num_keys, is_fixed = cache.capacity, True
        starts, keys = np.array(self._starts)[:, None, None, None], np.arange(num_keys)
        own = starts + self._width + np.arange(width)[:, None]
        return Columns(
            tokens=np.zeros((num_rows, width), dtype=np.int64),
            positions=np.zeros((num_rows, width), dtype=np.int64),
            states=torch.zeros((num_rows, width, self.head.hidden_size), dtype=self._dtype, device=self._device),
            mask=(keys < starts) | (keys == own),
            num_new=num_new,
            is_fixed=is_fixed,
        )

    def _place_pairs(self, place: int, pair: tuple[list[int], torch.Tensor], columns: Columns) -> None:
        """The next pairs of a row's text in its first new columns; each sees those before it."""
        ids, inputs = pair
        count, first = len(ids), self._starts[place] + self._width
        columns.tokens[place, :count] = ids
        columns.states[place, :count] = self.head.fuse(inputs) if self.index == 0 else inputs
        columns.mask[place, 0, :count, first : first + count] = np.tri(count, dtype=np.bool_)

    def _place_nodes(self, place: int, want: Wanted, before: int, columns: Columns) -> None:
        """Nodes in the columns after `before` others; each sees the text, its path and itself."""
        row, start, count = self.rows[place], self._starts[place], len(want.nodes)
        own = slice(before, before + count)
        columns.tokens[place, own] = [want.tree.tokens[node] for node in want.nodes]
        columns.states[place, own] = torch.stack(list(want.inputs))
        columns.mask[place, 0, own, start + row.offset : start + row.offset + row.num_written] = True
        for column, node in enumerate(want.nodes, start=before):
            path = [*row.paths.get(want.tree.parents[node], ()), self._width + column]
            row.paths[node] = path
            columns.mask[place, 0, column, [start + seen for seen in path]] = True

    @property
    def _starts(self) -> tuple[int, ...]:
        """Pairs of each row in the cache, where its columns of this round begin."""
        return self._cache.lengths

    def _run(self, columns: Columns) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(rows, Q, hidden_size)`, and over buffers of fixed shape the logits, `(rows, Q, draft_vocab_size)`."""
        head = self.head
        keys = [self._key_positions(columns.num_keys)] if head.has_window else []
        arrays = (columns.tokens, columns.positions, columns.mask, *keys)
        ids, positions, visible, *key_positions = to_device(arrays, self._device)
        inputs = {
            "embeddings": self.embed(ids),
            "states": columns.states,
            "positions": positions,
            "mask": visible,
            "cache": self._cache,
            "key_positions": key_positions[0] if keys else None,
            "stage": self.index,
        }
        self._width += columns.num_new
        if self._shapes is None or not columns.is_fixed:
            computed: torch.Tensor = head(**inputs)
            return computed, None
        return self._shapes.run((len(self.rows), columns.width, columns.num_keys, self.index), inputs)

    def _key_positions(self, total: int) -> Array:
        """`(rows, K)`: position of each key in its text."""
        found = np.array([row.first for row in self.rows])[:, None] + np.arange(total)
        for row, start, own in zip(self.rows, self._starts, found, strict=True):
            own[start : start + len(row.positions)] = row.positions
        return found


def _pair_step(head: PairHead) -> Step:
    """A head's forward with the logits of all its columns, as a function of one shape."""

    def step(*, stage: int, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        computed = head(stage=stage, **inputs)  # (rows, Q, hidden_size)
        flat = computed.flatten(0, 1)
        return computed, head.logits(flat).view(*computed.shape[:2], -1)

    return step


PAIR_STEP = StepKind(_pair_step, {"embeddings": 1, "states": 1, "positions": 1, "mask": 2})
