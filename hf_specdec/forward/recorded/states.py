"""Steps of a record that continue states of the cache's layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateFunction:
    """A function that continues states of a layer of the cache.

    Attributes:
        function: of the layer and tensors.
        layer (`int`): number of the layer.
    """

    function: Callable[..., torch.Tensor]
    layer: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Stands for the `joined` of a layer of the cache."""
