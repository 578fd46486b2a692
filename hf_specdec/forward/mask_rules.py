"""The columns of one forward, and their masks by a rule: each sees all of the text, or a window of it.

A rule is found by asking the model's own mask function about positions, and holds for this call once a mask that the
model has made equals the rule's. By a rule masks are made on the host, without the model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hf_specdec.common.transfer import Array, HostArrays, additive_bits

Kind = str | None  # of layer; `None` where all layers have one mask
Masks = dict[Kind, torch.Tensor]
FIRST = 16  # positions that are all tried


class TreeRows:
    """The columns written since the last commit, C in each row, of which the forward computes the last Q.

    Args:
        starts: each row's length in the cache before its first column.
        depths: each row's C distances from there: position id - start.
        visible: for each row `(Q, C)` bool: which columns each of the last Q sees.

    Attributes:
        shape (`tuple[int, int, int]`): batch, Q and C.
        host_starts, host_depths, host_visible (`ndarray`): `(batch,)`, `(batch, C)` and `(batch, Q, C)` bool.
    """

    def __init__(
        self, starts: Sequence[int], depths: Sequence[Sequence[int]], visible: Sequence[Array], device: torch.device
    ) -> None:
        self.device = device
        self.host_starts, self.host_depths = np.array(starts), np.array(depths)
        self.host_visible = visible[0][None] if len(visible) == 1 else np.stack(visible)
        batch, num_queries, num_columns = self.host_visible.shape
        self.shape = (batch, num_queries, num_columns)

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

    def seen(self, window: int | None, num_keys: int, padding: Array | None) -> Array:
        """`(batch, 1, Q, num_keys)` bool: what each of the last Q columns sees of the buffers.

        Args:
            window: how many positions back a column sees, its own counted; `None` for all.
            padding: `(batch, P)` bool: which of the first keys are seen; `None` where all are.
        """
        batch, num_queries, num_columns = self.shape
        seen = np.zeros((batch, 1, num_queries, num_keys), dtype=np.bool_)
        asking, new = self.host_depths[:, -num_queries:, None], self.host_visible  # (batch, Q, 1), (batch, Q, C)
        if window is not None:
            new = new & (self.host_depths[:, None] > asking - window)
        for row, start in enumerate(self.host_starts):
            text = seen[row, 0, :, :start]
            text[...] = True if window is None else np.arange(start) > start + asking[row] - window
            if padding is not None:
                shown = padding[row, :start]
                text[:, : len(shown)] &= shown
            seen[row, 0, :, start : start + num_columns] = new[row]
        return seen


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


class MaskRules:
    """The masks of one call's forwards by rules.

    Args:
        windows: for each kind of layer how many positions back a query sees, its own counted; `None` for all.
        dtype: `torch.bool`, or that of masks which are added to the scores.
        lowest (`float`): what such a mask adds where a key is hidden.
    """

    def __init__(self, windows: Mapping[Kind, int | None], dtype: torch.dtype, lowest: float) -> None:
        self.windows, self.dtype, self.lowest = dict(windows), dtype, lowest
        self._distinct = list(dict.fromkeys(self.windows.values()))

    def arrays(self, rows: TreeRows, num_keys: int, padding: Array | None) -> HostArrays:
        """`(batch, 1, Q, num_keys)` for each window, to be brought to the rows' device."""
        seen = [rows.seen(window, num_keys, padding) for window in self._distinct]
        return [additive_bits(mask, self.dtype, self.lowest) for mask in seen], [self.dtype] * len(seen)

    def masks(self, sent: Sequence[torch.Tensor]) -> Masks:
        """The mask of each kind, out of `arrays` on a device."""
        return {kind: sent[self._distinct.index(window)] for kind, window in self.windows.items()}


def same_masks(masks: Masks, expected: Masks) -> bool:
    """Returns whether they are the same masks, element by element."""
    return masks.keys() == expected.keys() and all(
        mask.dtype == expected[kind].dtype and torch.equal(mask, expected[kind]) for kind, mask in masks.items()
    )
