"""Random numbers of a call: a stream of its own next to other threads, and states to go back to."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from hf_specdec.common.transfer import HOST

DRAWS = (torch.multinomial, torch.rand)
OTHER_SEED = 0x1E3779B97F4A7C15  # any number: a seed that nothing else is seeded with


def drawn_seed() -> int:
    """A seed, drawn from the global generator."""
    return int(torch.randint(1 << 62, (), device=HOST))


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
        options = kwargs or {}
        if function is _own_generator:
            return self._generator(*args)
        if function in DRAWS and options.get("generator") is None:
            drawn_from = args[0] if args else options.get("input")
            device = drawn_from.device if isinstance(drawn_from, torch.Tensor) else options.get("device")
            options = {**options, "generator": self._generator(torch.device(device or "cpu"))}
        return function(*args, **options)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


class RandomStream:
    """Random stream of a device: a generator, or the device's global one, which others may advance.

    Args:
        generator: `None` is the global one, or that of the `OwnDraws` around.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device = device
        self.generator = _own_generator(device) if generator is None else generator

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


def _own_generator(device: torch.device) -> torch.Generator | None:
    """The generator of the `OwnDraws` that this thread is in, `None` outside of any: they are asked by torch's way."""
    if not has_torch_function((device,)):
        return None
    generator: torch.Generator | None = handle_torch_function(_own_generator, (device,), device)
    return generator
