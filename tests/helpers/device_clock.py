"""An accelerator on a clock: forwards take a given time on it, and the host goes on until it reads.

The CPU computes, and its time does not count: the clock has this thread's time without that of tensor operations. Each
of these costs the host a launch instead, and begins on the device once the one before it has ended.

    python -m tests.helpers.device_clock --forward-ms 6.1     # share of a step in which the device has no work
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.cache import spec_cache, spec_layer, static_cache
from hf_specdec.common import transfer
from hf_specdec.engine import static_shapes, step
from hf_specdec.engine.cost import cost_model
from hf_specdec.engine.sampling import node_processors, rejections
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.methods.common import node_logits
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.prompts import default_prompts
from tests.helpers.devices import emulate
from tests.helpers.graphs import on_cpu
from tests.helpers.operations import VIEWS

__all__ = ["DeviceClock", "Steps", "measure_steps"]
LAUNCH, KERNEL, TRANSFER = 6e-6, 4e-6, 12e-6  # seconds: of the host and of the device for a small operation, of a copy
CALL = 0.3e-3  # of the host for a compiled forward of 32 layers: 0.2 of it around the graph, on one core of an AMD EPYC
FREE = VIEWS | {"empty", "empty_strided", "new_empty", "_to_copy", "_unsafe_view", "as_strided"}  # launch nothing
WARM = 4  # forwards in which buffers and masks are made
LENGTH, NEW = 512, 128  # tokens of a prompt and of what follows
DECODING = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "cache_implementation": "static"}


class DeviceClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, in one thread; `attach` first.

    Args:
        forward: seconds of a forward of the target, of any width.
    """

    def __init__(self, forward: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = forward
        self.left_out = self.added = 0.0  # seconds of this thread that do not count, and those that count besides
        self.free_at = self.busy = 0.0
        self.begun: list[tuple[float, float]] = []  # the time and what the device has worked, as forwards are launched
        self._is_inside, self._of_dispatch = False, 0.0
        self._of_dispatch = self._measure()

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() - self.left_out + self.added

    def launch(self, seconds: float, host: float) -> None:
        """Let the device work, once it is free, and the host pay for the launch."""
        self.added += host
        self.free_at = max(self.now(), self.free_at) + seconds
        self.busy += seconds

    def wait(self, until: float | None = None) -> None:
        """Let the host wait for what was launched so far, or until a time."""
        self.added += max((self.free_at if until is None else until) - self.now(), 0.0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:
            return function(*args, **(kwargs or {}))
        start, self._is_inside = time.thread_time(), True
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            self.left_out, self._is_inside = self.left_out + time.thread_time() - start + self._of_dispatch, False
        if function.overloadpacket.__name__ not in FREE:
            self.launch(KERNEL, LAUNCH)
        return result

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """What the device would compute."""
        start, self._is_inside = time.thread_time(), True
        try:
            yield
        finally:
            self.left_out, self._is_inside = self.left_out + time.thread_time() - start, False

    def _measure(self, count: int = 5000) -> float:
        """Seconds that the mode itself takes for an operation."""
        tensor = torch.zeros(4)
        seconds = []
        for _ in range(3):
            with self:
                start = self.now()
                for _ in range(count):
                    torch.ops.aten.alias(tensor)
                seconds.append((self.now() - start) / count)
        return min(seconds)

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the engine launch forwards on this clock, read from it and ask it for the time."""
        emulate(monkeypatch)
        monkeypatch.setattr(static_shapes, "is_host", lambda device: False)
        monkeypatch.setattr(transfer, "STAGED", {"cpu"})
        for assumed in ("SLOPES", "JUMPS"):  # of a CPU
            monkeypatch.setattr(cost_model, assumed, {})
        monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=self.now))
        read, upload, clock = node_logits._on_host, transfer.upload, self

        def run(compiled: CompiledForward, shape: Any, inputs: Any, checked: Any = None) -> Any:
            compiled.shapes[shape] = compiled.shapes.get(shape, 0) + 1
            with clock._computing():
                result = compiled.as_written(inputs)
            clock.launch(clock.forward, CALL)
            clock.begun.append((clock.now(), clock.busy))
            return result

        def on_host(tensor: torch.Tensor) -> Any:
            clock.launch(KERNEL, TRANSFER)
            clock.wait()
            with clock._computing():
                return read(tensor)

        def uploaded(tensor: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
            clock.launch(KERNEL, TRANSFER)
            with clock._computing():
                return upload(tensor, device, into)

        monkeypatch.setattr(CompiledForward, "__call__", run)
        monkeypatch.setattr(node_logits, "_on_host", on_host)
        for module in (transfer, spec_cache, spec_layer, static_cache, rejections, node_processors):
            monkeypatch.setattr(module, "upload", uploaded)


class Steps(NamedTuple):
    """Means of the steps between forwards.

    Attributes:
        num_steps (`int`): of all texts.
        seconds, busy: of a step, and those in which the device works.
    """

    num_steps: int
    seconds: float
    busy: float

    @property
    def idle_share(self) -> float:
        """Share of a step in which the device has no work."""
        return 1.0 - self.busy / self.seconds


def same_length_texts(loaded: LoadedModel, count: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of `(1, LENGTH)` ids: the default prompts' tokens in a circle, each from another place."""
    text = [token for prompt in default_prompts() for token in prompt.encode(loaded.tokenizer)]
    step = max(len(text) // count, 1)
    ids = [
        torch.tensor([[text[(first * step + place) % len(text)] for place in range(LENGTH)]]) for first in range(count)
    ]
    return [{"input_ids": tensor, "attention_mask": torch.ones_like(tensor)} for tensor in ids]


def measure_steps(loaded: LoadedModel, forward: float, *, num_texts: int = 3, **options: Any) -> Steps:
    """Steps of calls on as many texts, after one more; each text is checked to be plain generation's.

    Args:
        loaded: a model on the CPU.
        forward: seconds of the target's forwards.
        options: of `generate`.
    """
    model: Any = loaded.model
    num_steps, seconds, busy = 0, 0.0, 0.0
    for number, inputs in enumerate(same_length_texts(loaded, 1 + num_texts)):
        how = {**inputs, **DECODING, "do_sample": False, **options}
        theirs = {name: value for name, value in how.items() if not name.startswith("spec")}
        torch.manual_seed(0)
        expected = model.generate(**theirs, spec_method=None, disable_compile=True)
        clock = DeviceClock(forward)
        with pytest.MonkeyPatch.context() as monkeypatch:
            clock.attach(monkeypatch)
            torch.manual_seed(0)
            with clock:
                tokens = model.generate(**how, compile_config=on_cpu("eager"))
        assert tokens.tolist() == expected.tolist()
        counted = clock.begun[WARM:]
        if number and len(counted) > 1:
            num_steps += len(counted) - 1
            seconds += counted[-1][0] - counted[0][0]
            busy += counted[-1][1] - counted[0][1]
    return Steps(num_steps, seconds / num_steps, busy / num_steps)


def main() -> None:
    """Print the idle share of a step, greedily and sampled."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[6.1, 1.5])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6, help="that the embedded target is widened to")
    parser.add_argument("--model", help="another one; of a small one the host's caches keep what a step needs")
    arguments = parser.parse_args()
    widen_to = None if arguments.model else (256, arguments.layers)
    loaded = load_model(arguments.model, dtype="fp32", widen_to=widen_to, device=torch.device("cpu"))
    auto = {"spec_method": "auto", "spec_config": {"pool": "request"}}
    ways = {"auto": auto, "auto, sampled": auto | {"do_sample": True, "temperature": 0.7}}
    for milliseconds in arguments.forward_ms:
        for name, options in ways.items():
            steps = measure_steps(loaded, milliseconds / 1000, num_texts=arguments.texts, **options)
            length = 1000 * steps.seconds
            print(f"{milliseconds} ms, {name}: {steps.idle_share:.1%} idle of {length:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
