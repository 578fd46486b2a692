"""Layers' forwards by the compiled core, in threads that are inside a block of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from hf_specdec.common.replaced import Replacement, here, replaced
from hf_specdec.compat.modules import NO_BLOCK, parameters_of, without_modes
from hf_specdec.kernels import cpu


@dataclass(slots=True)
class Attended:
    """Attention of the forwards in a `counted` block.

    Attributes:
        by_core (`int`): calls that the core has computed.
        by_torch (`set[str]`): classes of the modules whose attention torch has computed, and functions of torch that
            have added up other products.
    """

    by_core: int = 0
    by_torch: set[str] = field(default_factory=set)


@contextlib.contextmanager
def counted() -> Iterator[Attended]:
    """A block whose calls of attention, in blocks with the core in this thread, are counted."""
    attended = Attended()
    with replaced(counting=attended):
        yield attended


def unseen() -> contextlib.AbstractContextManager[None]:
    """A block of this package's code, which a mode that lets the core compute need not see; one that counts does."""
    return without_modes() if here.depth and here.counting is None else NO_BLOCK


def is_readable(weight: object) -> TypeGuard[torch.nn.Parameter]:
    """True if the core can read a layer's weight: a plain parameter of a dtype that it knows, and not sparse."""
    return type(weight) is torch.nn.Parameter and weight.layout == torch.strided and weight.dtype in cpu.KINDS


class OwnForward(Replacement):
    """Replacement of a layer's forward of one tensor."""

    __slots__ = ()

    def torchs(self, states: torch.Tensor) -> torch.Tensor:
        """Calls the forward of the module's class."""
        result: torch.Tensor = type(self.module).forward(self.module, states)
        return result


class WeightForward(OwnForward):
    """The same of a layer with a weight that is a plain parameter."""

    __slots__ = ("_parameters", "bias", "dtype", "shape", "weight")

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._parameters = parameters_of(module)
        weight, self.bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        self.weight, self.dtype, self.shape = weight, weight.dtype, weight.shape

    def fits(self, states: torch.Tensor, size: int) -> bool:
        """True if this thread is in a block, and the core can read the layer, and states of `size` numbers a token."""
        parameters, weight, bias = self._parameters, self.weight, self.bias
        return (
            here.depth > 0
            and type(states) is torch.Tensor
            and states.dtype == self.dtype
            and states.is_cpu
            and states.shape[-1:] == (size,)
            and parameters.get("weight") is weight
            and parameters.get("bias") is bias
            and weight.dtype == self.dtype
            and weight.shape == self.shape
            and weight.is_cpu
            and weight.is_contiguous()
            and (bias is None or (bias.dtype == self.dtype and bias.is_cpu and bias.is_contiguous()))
        )
