"""Notes of the core's calls, taken while a forward is recorded.

Kernels report what they compute to the recorder that is open in their thread, if one is.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Takes notes of one forward."""

    def core(self, name: str, tensors: tuple[torch.Tensor | None, ...], numbers: Mapping[str, Any]) -> None:
        """The core has computed `name` of tensors and numbers; the last tensor holds the result."""

    def call(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """A function of tensors is computed as a whole, whatever torch calls inside."""

    def update(self, layer: int, states: tuple[torch.Tensor, ...], columns: tuple[torch.Tensor, ...]) -> None:
        """Keys and values have been written into a layer of the cache, which returns `columns`."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A block of which nothing is noted."""


class _Open(threading.local):
    recorder: Recorder | None = None


_open = _Open()


def recorder() -> Recorder | None:
    """The recorder that is open in this thread."""
    return _open.recorder


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """A block of this thread whose forward `recorder` takes notes of."""
    _open.recorder = recorder
    try:
        yield
    finally:
        _open.recorder = None
