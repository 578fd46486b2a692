"""Random numbers of a call: the stream of a text, and states to go back to."""

import contextlib
from collections.abc import Iterator

import torch

from hf_specdec.common.transfer import HOST

OTHER_SEED = 0x1E3779B97F4A7C15  # any number: a seed that nothing else is seeded with


def drawn_seed() -> int:
    """A seed, drawn from the global generator."""
    return int(torch.randint(1 << 62, (), device=HOST))


class RandomStream:
    """Random stream of a device: a generator, or the device's global one, which others may advance.

    Args:
        generator: `None` is the global one.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device, self.generator = device, generator

    @property
    def state(self) -> torch.Tensor:
        """The generator's state; no read of the device."""
        if self.generator is not None:
            return self.generator.get_state()
        if self.device.type == HOST.type:
            return torch.get_rng_state()
        state: torch.Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        elif self.device.type == HOST.type:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws as after `torch.manual_seed(seed)`; afterwards the global generators go on as before."""
    streams = [RandomStream(place) for place in dict.fromkeys((HOST, device))]
    before = [stream.state for stream in streams]
    torch.manual_seed(seed)
    try:
        yield
    finally:
        for stream, state in zip(streams, before, strict=True):
            stream.state = state


class SeparateDraws:
    """Blocks of a caller's code, whose draws from the global generators take no number of the text's.

    Inside they come from a stream of their own, which goes on from block to block. It is seeded by the text's, so that
    a seed gives the same numbers again. Other threads must not draw from the global generators meanwhile.

    Args:
        device: whose generator is kept next to the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = tuple(dict.fromkeys((HOST, device)))
        self._inside: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []
        self._streams: list[RandomStream] = []

    def __enter__(self) -> None:
        self._streams = [RandomStream(device) for device in self._devices]
        self._outside = [stream.state for stream in self._streams]
        if not self._inside:
            copy = torch.Generator()
            copy.set_state(self._outside[0])
            seed = int(torch.randint(1 << 62, (), generator=copy, device=HOST)) ^ OTHER_SEED
            self._inside = [torch.Generator(device).manual_seed(seed).get_state() for device in self._devices]
        for stream, state in zip(self._streams, self._inside, strict=True):
            stream.state = state

    def __exit__(self, *_: object) -> None:
        self._inside = [stream.state for stream in self._streams]
        for stream, state in zip(self._streams, self._outside, strict=True):
            stream.state = state
