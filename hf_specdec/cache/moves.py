"""Columns of a cache that change place when drafts are accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_specdec.common.transfer import upload


@dataclass(frozen=True, slots=True)
class Moves:
    """Columns that change place, M of them, all rows together.

    Attributes:
        rows, source, target: `(M,)`: column `source` of row `rows` goes to column `target`; columns count from the
            text's first token.
    """

    rows: list[int]
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> "Moves | None":
        """Index that moves the columns in `paths` to each row's start; `None` where they are already."""
        rows: list[int] = []
        source: list[int] = []
        target: list[int] = []
        for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
            for place, column in enumerate(path):
                if place != column:
                    rows.append(row)
                    source.append(start + column)
                    target.append(start + place)
        return cls(rows, source, target) if rows else None

    def on(self, device: torch.device, offset: int) -> tuple[torch.Tensor, ...]:
        """Rows, sources and targets on `device`, in buffers that begin at column `offset`."""
        columns = np.array((self.rows, self.source, self.target))
        columns[1:] -= offset
        return upload(torch.from_numpy(columns), device).unbind()
