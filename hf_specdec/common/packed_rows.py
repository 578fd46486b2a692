"""The new columns of a batch's rows in one line, without the padding of the narrower rows."""

from collections.abc import Sequence

import numpy as np
import torch


class PackedRows:
    """Places of the N columns of a packed forward in their rows; on the host.

    Args:
        counts: new columns of each of B rows, N in all.
        lengths: of the rows before them.

    Attributes:
        counts (`list[int]`): as given.
        starts (`list[int]`): place of each row's first column in the line.
        width (`int`): columns W of the widest row.
        rows, columns: `(N,)`: row of each column, and its number there.
        bounds: `(2B + 1,)`: `starts`, N, and how many columns each row ends before the longest padded one.
    """

    def __init__(self, counts: Sequence[int], lengths: Sequence[int]) -> None:
        self.counts, self.width = list(counts), max(counts)
        ends = np.cumsum(counts)
        self.starts: list[int] = (ends - counts).tolist()
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(ends[-1]) - np.repeat(self.starts, counts)
        self.rows, self.columns = torch.from_numpy(rows), torch.from_numpy(columns)
        missing = max(lengths) + self.width - np.add(lengths, counts)
        self.bounds = torch.from_numpy(np.concatenate(([0], ends, missing)))
        self._kept = torch.from_numpy(rows * self.width + columns)  # (N,) places among B x W
        filled = np.minimum(np.add.outer(self.starts, np.arange(self.width)), ends[-1] - 1)
        self._filled = torch.from_numpy(filled.reshape(-1))  # (B x W,) places in the line; padding repeats any column

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """`(1, N, ...)` of `(B, W, ...)`."""
        return padded.flatten(0, 1).index_select(0, self._kept)[None]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`(B, W, ...)` of `(1, N, ...)`; what padding holds has no meaning."""
        rows = packed[0].index_select(0, self._filled)
        return rows.view(len(self.counts), self.width, *rows.shape[1:])
