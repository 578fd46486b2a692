"""DFlash 2's convolutions over the tokens of a block, before and after a layer's attention and MLP."""

import torch
from torch import nn


class BlockConvolution(nn.Module):
    """Causal convolutions whose kernels depend on the token, shared by groups of channels.

    Args:
        block_size: tokens of a block.
        hidden_size: channels.
        kernel_size: tokens that each reads, its own counted.
        group_size: channels that share what is added to their kernels.

    Attributes:
        base_kernel: `(2, kernel_size, hidden_size)`, of the input and of the output.
    """

    def __init__(self, block_size: int, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.shape = (2, kernel_size, hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.shape[2], bias=False)

    def before(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input states `(batch, N, hidden_size)`, convolved, and what `after` adds to its kernels."""
        added = self.kernel_projection(states).view(*states.shape[:-1], *self.shape)
        return self._convolved(states, added[..., 0, :, :], self.base_kernel[0]), added[..., 1, :, :]

    def after(self, states: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Output states, convolved."""
        return self._convolved(states, added, self.base_kernel[1])

    def _convolved(self, states: torch.Tensor, added: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """The sum over taps, `base` `(kernel_size, hidden_size)`; a block's first token has none before it."""
        groups = states.reshape(-1, self.block_size, self.shape[2], states.shape[-1] // self.shape[2])
        added = added.reshape(-1, self.block_size, *self.shape[1:])  # (blocks, block_size, kernel_size, groups)
        mixed = torch.zeros_like(groups)
        for tap in range(self.shape[1]):
            shifted = nn.functional.pad(groups, (0, 0, 0, 0, tap, 0))[:, : groups.shape[1]]
            mixed = mixed + shifted * (base[tap].view(groups.shape[2:]) + added[..., tap, :, None])
        return mixed.view_as(states)
