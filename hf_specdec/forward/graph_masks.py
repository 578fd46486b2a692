"""Masks of trees that a compiled step makes itself: a few operations inside of its graph, none before its launch."""

from collections.abc import Mapping
from typing import Any

import torch

TREE = "hf_specdec_tree"  # argument of a step in the place of its masks
TREE_DIMS = (("blocks", 2), ("blocks", 3), ("firsts", 2))  # of the tensors in there, as long as the forward is wide


def with_masks(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model's forward: with the masks of `TREE`, where that is among them.

    `TREE` has

    - `kinds`: of each kind of layer its name, `None` where all have one mask, and the places of its block and window,
    - `blocks`: `(batch, 1, Q, Q)` bool: which of the new columns each of them sees,
    - `firsts`: of each window `(batch, 1, Q, 1)`: the first position that is seen,
    - `columns`: `(batch, Q)`: places of the new columns in the buffers,
    - `keys`: `(K,)`: 0, 1, 2, ...,
    - `ends`: what shows and what hides a key, scalars; booleans for masks of booleans,
    - `padding`: `(batch, K)` bool: which columns of the text are seen,
    - `name`: of the forward's argument.
    """
    if TREE not in inputs:
        return dict(inputs)
    tree = inputs[TREE]
    others = {name: value for name, value in inputs.items() if name != TREE}
    masks = {kind: _mask(tree, block, window) for kind, block, window in tree["kinds"]}
    return {**others, tree["name"]: masks.get(None, masks)}


def _mask(tree: Mapping[str, Any], block: int, window: int | None) -> torch.Tensor:
    """`(batch, 1, Q, K)` of one kind of layer."""
    seen = tree["blocks"][block]
    width, keys = seen.shape[-1], tree["keys"]
    offset = keys - tree["columns"][:, None, None, :1]  # (batch, 1, 1, K), from the first new column
    text = (offset < 0) & tree["padding"][:, None, None]
    if window is not None:
        text = text & (keys >= tree["firsts"][window])
    new = seen.gather(3, offset.clamp(0, width - 1).expand(-1, 1, width, -1)) & (offset >= 0) & (offset < width)
    shows, hides = tree["ends"]
    return (text | new) if hides.dtype == torch.bool else torch.where(text | new, shows, hides)
