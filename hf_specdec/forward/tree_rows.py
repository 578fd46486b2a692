"""The columns of one forward, as masks and positions are made of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


class TreeRows:
    """The columns written since the last commit, C in each row, of which the forward computes the last Q.

    Args:
        starts: each row's length in the cache before its first column.
        depths: each row's C distances from there: position id - start.
        visible: for each row `(Q, C)` bool: which columns each of the last Q sees.
        fixed (`bool`): whether the buffers go on after the columns.

    Attributes:
        shape (`tuple[int, int, int]`): batch, Q and C.
        same_start (`bool`): whether all rows are equally long and the columns are the last ones of the buffers.
        length (`int`): columns of the longest row, those of its text counted.
        host_starts, host_depths, host_visible (`ndarray`): `(batch,)`, `(batch, C)` and `(batch, Q, C)` bool.
    """

    def __init__(
        self,
        starts: Sequence[int],
        depths: Sequence[Sequence[int]],
        visible: Sequence[Array],
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self.device = device
        self.host_starts, self.host_depths = np.array(starts), np.array(depths)
        self.host_visible = visible[0][None] if len(visible) == 1 else np.stack(visible)
        batch, num_queries, num_columns = self.host_visible.shape
        self.shape = (batch, num_queries, num_columns)
        self.same_start = not fixed and min(starts) == max(starts)
        self.length = max(starts) + len(depths[0])

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """`(batch, Q, C)` bool."""
        return torch.from_numpy(self.host_visible).to(self.device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """`(batch,)`."""
        return torch.from_numpy(self.host_starts).to(self.device)

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        """`(batch, C)`."""
        return torch.from_numpy(self.host_depths).to(self.device)

    def seen_within(self, window: int | None) -> Array:
        """`(batch, Q, C)` bool: of what each of the last Q columns sees, what is less than `window` back."""
        if window is None:
            return self.host_visible
        asking = self.host_depths[:, -self.shape[1] :, None]
        return self.host_visible & (self.host_depths[:, None] > asking - window)

    def first_within(self, window: int) -> Array:
        """`(batch, Q)`: the first position less than `window` back from each of the last Q columns; it may be < 0."""
        first: Array = self.host_starts[:, None] + self.host_depths[:, -self.shape[1] :] - (window - 1)
        return first
