"""Random states of a call, which the probe of its model leaves as they are.

Forwards draw in train mode, for dropout, and some in eval mode too: Reformer's attention, hooks of users.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def random_states(device: torch.device) -> list[torch.Tensor]:
    """States of the global generators of the CPU and, if that is another device, of `device`."""
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *of_device]


def set_random_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def draws_numbers(function: Callable[[], object]) -> bool:
    """Returns whether `function`, whatever it raises, draws from global generators in this thread."""
    with _DrawWatch() as watch, contextlib.suppress(Exception):
        function()
    return bool(watch.has_drawn)


class _DrawWatch(TorchDispatchMode):
    """Notes whether random numbers are drawn inside. Attention, which draws for its dropout alone, does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()
        return func(*args, **(kwargs or {}))
