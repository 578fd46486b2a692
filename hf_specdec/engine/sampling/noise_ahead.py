"""The random numbers of one text's draws to come, made once each: drafts look at them, then the draws use them."""

import functools
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.common.transfer import HOST, is_host
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.kernels.native import core

Array = npt.NDArray[Any]
NUM_ALLOCATED = 8  # rows at once
MOST_MADE = 3  # rows that a step on an accelerator makes, if drafts alone look at them
RAMP, RAMP_ON_DEVICE = 2, 1  # rows by which a step may look at more than the last: each is milliseconds, or a launch
NO_STATE_OF_DEVICE = {"mps"}  # its module has no state of one device


@dataclass(slots=True)
class _Row:
    """Noise of one draw."""

    noise: torch.Tensor  # (vocab_size,) fp32
    after: torch.Tensor  # the generator's state once it is made
    host: Array | None  # the noise as an array, where that is at hand


class NoiseAhead:
    """Rows of exponentially distributed numbers, as `torch.multinomial` makes one for each token that it draws.

    The stream stays as it is until a draw is taken: rows are made by a copy of its generator. Where something else has
    drawn from the stream since, they are made anew. Implements `methods.common.sampling.DrawNoise`.

    Args:
        stream: what the text's tokens are drawn with.

    Attributes:
        vocab_size: width of the fp32 probabilities that they are drawn from, set before the first row is asked for.
        seconds: that rows on the host have taken. Each is drawn with in the end, whichever step makes it.
    """

    vocab_size: int = 0
    seconds: float = 0.0

    def __init__(self, stream: RandomStream) -> None:
        self._stream, self._copy = stream, torch.Generator(stream.device)
        self._rows: deque[_Row] = deque()
        self._before = stream.state  # the generator's state before the first row
        self._room: list[torch.Tensor] = []  # to be written over
        self._ramp = RAMP if is_host(stream.device) else RAMP_ON_DEVICE
        self._most_on_host = 0  # rows that may be looked at there in this step
        self._num_kept = 0  # rows that were made before this step
        self._num_wanted = 0  # rows that a drafter has asked for at once
        self._num_read = 0  # rows that `unread` gave last

    @classmethod
    def of(cls, stream: RandomStream) -> "NoiseAhead | None":
        """Noise of `stream`; `None` where its device has no generator whose state is known."""
        return None if stream.device.type in NO_STATE_OF_DEVICE else cls(stream)

    def row(self, depth: int) -> torch.Tensor:
        """`(vocab_size,)` fp32 on the stream's device: what the probabilities `depth` tokens ahead are divided by.

        After a draw the first is asked for before others.
        """
        if not depth:
            self._synchronize()
        while len(self._rows) <= depth:
            start = time.perf_counter()
            self._copy.set_state(self._rows[-1].after if self._rows else self._before)
            if not self._room:
                room = torch.empty((NUM_ALLOCATED, self.vocab_size), dtype=torch.float32, device=self._stream.device)
                self._room += room.unbind()
            noise = _exponential(self._room.pop(), self._copy)
            host = noise.numpy() if is_host(noise.device) else None
            self._rows.append(_Row(noise, self._copy.get_state(), host))
            self.seconds += 0.0 if host is None else time.perf_counter() - start
        return self._rows[depth].noise

    def on_host(self, depth: int) -> Array | None:
        """`row` as an array, asked for from depth 0 on; `None` where it is not at hand.

        The first steps have few rows. On an accelerator a step reads what the one before it asked for.
        """
        if not depth:
            self._synchronize()
            self._most_on_host += self._ramp
        self._num_wanted = max(self._num_wanted, depth + 1)
        if depth >= self._most_on_host:
            return None
        if is_host(self._stream.device):
            self.row(depth)
        return self._rows[depth].host if depth < len(self._rows) else None

    def unread(self, depth: int) -> tuple[torch.Tensor, ...]:
        """Noise that a step of at most this depth reads on an accelerator: `(vocab_size,)` each, then `load`ed."""
        if not self._num_wanted or is_host(self._stream.device):
            self._num_read = 0
            return ()
        most = min(depth + 1 + self._num_wanted, self._most_on_host + self._ramp, self._num_kept + MOST_MADE)
        if most > len(self._rows):
            self.row(most - 1)
        rows = tuple(row.noise for row in itertools.islice(self._rows, most) if row.host is None)
        self._num_read = len(rows)
        return rows

    def load(self, read: Sequence[Array]) -> Sequence[Array]:
        """Take what was read of `unread` from the end of `read`; what is left."""
        end = len(read) - self._num_read
        waiting = [row for row in self._rows if row.host is None]
        for row, host in zip(waiting, read[end:], strict=False):
            row.host = host
        return read[:end]

    @property
    def is_current(self) -> bool:
        """Returns whether the first row is the one that the stream makes next."""
        return bool(self._rows) and _is_same(self._before, self._stream.state)

    def take(self) -> None:
        """The next token is drawn with the first row: the stream goes on where `torch.multinomial` leaves it."""
        self._before = self._rows.popleft().after
        self._stream.state = self._before

    def draw(self, probabilities: torch.Tensor) -> int | None:
        """The token that `torch.multinomial` draws from `(1, vocab_size)` probabilities on the host.

        `None` where it should draw by itself: where the probabilities are such that it raises.
        """
        if probabilities.shape != (1, self.vocab_size) or probabilities.dtype != torch.float32:
            return None
        noise = self.row(0)
        ratios = (probabilities / noise).numpy()[0]
        token = int(ratios.argmax())  # NumPy's takes a twentieth of torch's time
        if not ratios[token] > 0.0 or not self.is_current:  # asked last: other threads may draw from the stream
            return None
        self.take()
        return token

    def _synchronize(self) -> None:
        """Leave out the rows of tokens that were drawn since."""
        now = self._stream.state
        while self._rows and not _is_same(self._before, now):
            self._before = self._rows.popleft().after
        if not self._rows:
            self._before = now
        self._num_kept = len(self._rows)


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two states are one. They are on the host, whatever the generator's device."""
    return np.array_equal(first.numpy(), second.numpy())


def _exponential(room: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`room.exponential_(generator=generator)`, on the host by the core, in two fifths of the time."""
    if not is_host(room.device) or not _core_computes_the_same():
        return room.exponential_(generator=generator)
    return _of_uniform(room, generator)


def _of_uniform(room: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Computes what torch does of the same uniform numbers, one at a time."""
    assert core is not None
    uniform = torch.empty(len(room), dtype=torch.float64, device=room.device).uniform_(generator=generator)
    core.exponential(uniform.data_ptr(), room.data_ptr(), len(room))
    return room


@functools.cache
def _core_computes_the_same() -> bool:
    """Returns whether the core gives this torch's exponential numbers, and leaves the generator where it does."""
    if core is None or not core.has_kernels():
        return False
    rows, states = [], []
    for fill in (torch.Tensor.exponential_, _of_uniform):
        generator = torch.Generator(HOST).manual_seed(0)
        rows.append(fill(torch.empty(4096, dtype=torch.float32, device=HOST), generator=generator))
        states.append(generator.get_state())
    return torch.equal(*rows) and torch.equal(*states)
