"""Key/value buffers of several layers in one block of memory, so that columns move in all of them by one operation.

Knows nothing about tokens or rows.
"""

import torch

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
