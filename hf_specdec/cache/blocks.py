"""Key/value buffers of several layers in one block of memory, so that columns move in all of them by one operation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_specdec.common.transfer import upload

BLOCK_BYTES = 512 << 20  # bounds what a growing cache holds twice, and what layers of other shapes leave unused


class Blocks:
    """Hands out buffers of equal shape, one after the other from the same block.

    Args:
        num_layers (`int`): how many ask for buffers of a shape, if all layers are alike.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._open: dict[tuple[object, ...], tuple[torch.Tensor, int]] = {}  # the block and how many are handed out
        self._handed_out: dict[tuple[object, ...], int] = {}

    def take(
        self, shape: tuple[int, ...], like: torch.Tensor, *, per_layer: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer of zeros of this shape, and the block `(buffers, *shape)` that it is in.

        Args:
            like: has the dtype and the device.
            per_layer (`int`): buffers of this shape that each layer takes.
        """
        key = (shape, like.dtype, like.device)
        block, used = self._open.pop(key, (None, 0))
        total, handed_out = per_layer * self.num_layers, self._handed_out.get(key, 0)
        if block is None:
            fitting = BLOCK_BYTES // max(like.itemsize * torch.Size(shape).numel(), 1)
            block = like.new_zeros((max(1, min(total - handed_out % total, fitting)), *shape))
        if used + 1 < len(block):
            self._open[key] = (block, used + 1)
        self._handed_out[key] = handed_out + 1
        return block[used], block


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
