"""A random stream of one call's own, beside other threads that draw from the global one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OwnDraws"]

DRAWS = (torch.multinomial, torch.rand)


class OwnDraws(TorchFunctionMode):
    """Inside, this thread draws what it would draw after `torch.manual_seed(seed)`; the global generators stay as is.

    Covers the draws of sampling: of transformers' own loop, of ours and of drafters.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `function`, with a generator of the stream if it is a draw without one."""
        given = kwargs or {}
        if function in DRAWS and given.get("generator") is None:
            drawn_from = args[0] if args else given.get("input")
            device = drawn_from.device if isinstance(drawn_from, torch.Tensor) else given.get("device")
            given = {**given, "generator": self._generator(torch.device(device or "cpu"))}
        return function(*args, **given)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
