"""The random numbers of one text's draws to come, made once each: drafts look at them, then the draws use them."""

from collections import deque
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.engine.random_streams import RandomStream
from hf_specdec.transfer import is_host

__all__ = ["NoiseAhead"]


class NoiseAhead:
    """Rows of exponentially distributed numbers, as `torch.multinomial` makes one for each token that it draws.

    The stream stays as it is until a draw is taken: rows are made by a copy of its generator. Where something else has
    drawn from the stream since, they are made anew. Implements `methods.draw_noise.DrawNoise`.

    Args:
        stream: what the text's tokens are drawn with.
        vocab_size: width of the probabilities that they are drawn from.
    """

    def __init__(self, stream: RandomStream, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._stream, self._copy = stream, torch.Generator(stream.device)
        self._rows: deque[torch.Tensor] = deque()  # (1, vocab_size) each
        self._states: deque[torch.Tensor] = deque([stream.state])  # before each row, and after the last

    def row(self, depth: int) -> torch.Tensor:
        """`(vocab_size,)` fp32 on the stream's device: what the probabilities `depth` tokens ahead are divided by."""
        if not depth:
            self._synchronize()
        while len(self._rows) <= depth:
            self._copy.set_state(self._states[-1])
            made = torch.empty((1, self.vocab_size), dtype=torch.float32, device=self._stream.device)
            self._rows.append(made.exponential_(generator=self._copy))
            self._states.append(self._copy.get_state())
        return self._rows[depth][0]

    def on_host(self, depth: int) -> npt.NDArray[Any] | None:
        """`row` as an array; `None` where that would take a transfer."""
        return self.row(depth).numpy() if is_host(self._stream.device) else None

    def draw(self, probabilities: torch.Tensor) -> int | None:
        """The token that `torch.multinomial` draws from `(1, vocab_size)` probabilities, where its row is made already.

        `None` where it is not, and where the probabilities are such that `torch.multinomial` raises.
        """
        self._synchronize()
        if not self._rows or probabilities.shape != self._rows[0].shape or probabilities.dtype != torch.float32:
            return None
        ratios = probabilities / self._rows[0]
        token = int(ratios.argmax(dim=-1))
        if not ratios[0, token] > 0.0:  # no number, or no probability at all
            return None
        self._rows.popleft()
        self._states.popleft()
        self._stream.state = self._states[0]
        return token

    def _synchronize(self) -> None:
        """Leave out the rows of tokens that were drawn since."""
        now = self._stream.state
        while self._rows and not torch.equal(self._states[0], now):
            self._rows.popleft()
            self._states.popleft()
        if not self._rows:
            self._states[0] = now
