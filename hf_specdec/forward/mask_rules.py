"""Masks by a rule: every query sees all of the text, or a window of it, so the model need not be asked at each step.

A rule is found by asking the model's own mask function about positions, and holds for this call once a mask that the
model has made equals the rule's. Each mask takes a few operations, whatever the model would spend on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_specdec.common.transfer import Array, HostArrays, additive_bits, to_device
from hf_specdec.forward.tree_rows import TreeRows

Kind = str | None  # of layer; `None` where all layers have one mask
Masks = dict[Kind, torch.Tensor]
MIN_RUNWAY = 512
FIRST = 16  # positions that are all tried


def window_of(mask_function: Callable[..., torch.Tensor], window: int | None, device: torch.device) -> int | None:
    """`window` where a mask function in transformers' sense is causal and shows that many positions, `None` for all.

    Raises:
        ValueError: it shows something else at some of the positions that are tried.
    """
    reach = window or FIRST
    around = sorted({*range(FIRST), *(max(k * reach + near, 0) for k in range(4) for near in (-2, -1, 0, 1, 2))})
    places = torch.tensor(around, device=device)
    query, key = places.view(1, 1, -1, 1), places.view(1, 1, 1, -1)
    nothing = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    expected = key <= query if window is None else (key <= query) & (key > query - window)
    mask = mask_function(nothing, nothing, query, key)
    if mask.shape != expected.shape or not torch.equal(mask, expected):
        raise ValueError("the mask is neither causal nor that of a window")
    return window


@dataclass(frozen=True, slots=True)
class _Columns:
    """Column positions of one forward, on its device.

    Attributes:
        starts: `(batch, 1, 1, 1)`.
        places: `(batch, 1, 1, C)`: each column's place in the buffers.
        blocks: for each kind `(batch, 1, Q, C)`: what is seen of the columns, as a mask.
        firsts: for each window `(batch, 1, Q, 1)`: the first position that is seen.
    """

    starts: torch.Tensor
    places: torch.Tensor
    blocks: dict[Kind, torch.Tensor]
    firsts: dict[int, torch.Tensor]


class RuleMasks:
    """Builds the masks of one call. Not shared between threads.

    Args:
        windows: for each kind of layer how many positions back a query sees, its own counted; `None` for all.
        dtype: `torch.bool`, or that of masks which are added to the scores.
        lowest (`float`): what such a mask adds where a key is hidden.
    """

    def __init__(self, windows: Mapping[Kind, int | None], dtype: torch.dtype, lowest: float) -> None:
        self.windows, self.dtype, self.lowest = dict(windows), dtype, lowest
        self._distinct_windows = sorted({window for window in windows.values() if window is not None})
        self._numbers: torch.Tensor | None = None  # 0, 1, 2, ... for at least as many keys as the last mask had
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None  # what shows and what hides a key

    def arrays(self, rows: TreeRows) -> HostArrays:
        """All that a forward's masks are made of, to be brought to the rows' device."""
        windows, places = self._distinct_windows, rows.host_starts[:, None] + np.arange(rows.shape[2])
        arrays = [rows.host_starts[:, None, None, None], places[:, None, None]]
        arrays += [rows.first_within(window)[:, None, :, None] for window in windows]
        arrays += [additive_bits(rows.seen_within(w)[:, None], self.dtype, self.lowest) for w in self.windows.values()]
        return arrays, [None] * (2 + len(windows)) + [self.dtype] * len(self.windows)

    def build(
        self, rows: TreeRows, num_keys: int, padding: torch.Tensor | None, sent: Sequence[torch.Tensor] = ()
    ) -> Masks:
        """For each kind `(batch, 1, Q, num_keys)`.

        Args:
            padding: `(batch, P)` bool: which of the first keys are seen; `None` where all are.
            sent: `arrays` on the rows' device, where they are there.
        """
        if not sent:
            arrays, dtypes = self.arrays(rows)
            sent = to_device(arrays, rows.device, dtypes)
        columns = self._columns_of(sent)
        if rows.same_start and padding is None:
            return {kind: self._at_the_end(rows, kind, columns) for kind in self.windows}
        text = self._keys(num_keys, rows.device) < columns.starts  # (batch, 1, 1, K)
        if padding is not None:
            text[..., : padding.shape[1]].logical_and_(padding[:, None, None])
        return {kind: self._anywhere(rows, kind, columns, text) for kind in self.windows}

    def tree_arrays(self, rows: TreeRows) -> list[Array]:
        """All that `tree` is made of but the columns, to be brought to the rows' device."""
        blocks = [rows.seen_within(window)[:, None] for window in dict.fromkeys(self.windows.values())]
        return blocks + [rows.first_within(window)[:, None, :, None] for window in self._distinct_windows]

    def tree(
        self, sent: Sequence[torch.Tensor], columns: torch.Tensor, padding: torch.Tensor, num_keys: int
    ) -> dict[str, Any]:
        """Parts that `graph_masks.with_masks` makes the masks of, but for the argument's name.

        Args:
            sent: `tree_arrays` on a device.
            columns: `(batch, Q)`: the new columns' places in the buffers.
            padding: `(batch, num_keys)` bool.
        """
        windows = list(dict.fromkeys(self.windows.values()))
        firsts: dict[int | None, int] = {window: place for place, window in enumerate(self._distinct_windows)}
        kinds = [(kind, windows.index(window), firsts.get(window)) for kind, window in self.windows.items()]
        return {
            "kinds": tuple(kinds),
            "blocks": tuple(sent[: len(windows)]),
            "firsts": tuple(sent[len(windows) :]),
            "columns": columns,
            "keys": self._keys(num_keys, columns.device),
            "ends": self._ends_on(columns.device),
            "padding": padding,
        }

    def _columns_of(self, sent: Sequence[torch.Tensor]) -> _Columns:
        starts, places, *others = sent
        count = len(self._distinct_windows)
        firsts = dict(zip(self._distinct_windows, others[:count], strict=True))
        blocks = dict(zip(self.windows, others[count:], strict=True))
        return _Columns(starts, places, blocks, firsts)

    def _at_the_end(self, rows: TreeRows, kind: Kind, columns: _Columns) -> torch.Tensor:
        """Mask where the columns are the buffers' last ones, in all rows alike."""
        batch, num_queries, num_columns = rows.shape
        window, text = self.windows[kind], rows.length - num_columns
        if window is None or rows.first_within(window).max() <= 0:
            shown, _ = self._ends_on(rows.device)
            before = shown.expand(batch, 1, num_queries, text)
        else:
            seen = self._keys(text, rows.device) >= columns.firsts[window]
            before = seen if self.dtype == torch.bool else torch.where(seen, *self._ends_on(rows.device))
        return torch.cat([before, columns.blocks[kind]], dim=-1)

    def _anywhere(self, rows: TreeRows, kind: Kind, columns: _Columns, text: torch.Tensor) -> torch.Tensor:
        """Mask where each row's columns follow its own text."""
        window = self.windows[kind]
        if window is not None:
            text = (self._keys(text.shape[-1], rows.device) >= columns.firsts[window]).logical_and_(text)
        mask = self._filled(text.expand(-1, -1, rows.shape[1], -1))
        mask.scatter_(3, columns.places.expand(-1, -1, rows.shape[1], -1), columns.blocks[kind])
        return mask

    def _filled(self, seen: torch.Tensor) -> torch.Tensor:
        """A new mask that shows these keys, `(batch, 1, Q, K)` bool."""
        if self.dtype == torch.bool:
            return seen.clone(memory_format=torch.contiguous_format)
        return torch.where(seen, *self._ends_on(seen.device))

    def _keys(self, count: int, device: torch.device) -> torch.Tensor:
        """`(count,)`: 0, 1, 2, ..."""
        if self._numbers is None or len(self._numbers) < count:
            self._numbers = torch.arange(count + MIN_RUNWAY, device=device)
        return self._numbers[:count]

    def _ends_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._ends is None:
            ends = (True, False) if self.dtype == torch.bool else (0.0, self.lowest)
            shows, hides = (torch.tensor(end, dtype=self.dtype, device=device) for end in ends)
            self._ends = (shows, hides)
        return self._ends


def same_masks(masks: Masks, expected: Masks) -> bool:
    """Returns whether they are the same masks, element by element."""
    return masks.keys() == expected.keys() and all(
        mask.dtype == expected[kind].dtype and torch.equal(mask, expected[kind]) for kind, mask in masks.items()
    )
