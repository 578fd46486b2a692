"""The tokens that a step's nodes would draw, found on the device before the host knows which of them are reached.

`torch.multinomial` draws one token as the argmax of p / e, e exponentially distributed. Which e a token takes depends
on how many tokens were drawn before it, its depth, and not on its node. So the draws of the first levels are made for
all nodes, read with the rest of a step, and the generator is set to where the last draw that counted left it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hf_specdec.engine.random_streams import RandomStream

__all__ = ["LEVELS", "DrawsAhead"]

LEVELS = 3  # drawn ahead: each is a launch, and sampled texts seldom accept more


class DrawsAhead:
    """One step's draws of one text.

    Args:
        probabilities: `(T, vocab_size)` fp32 of the nodes.
        depths: of the nodes.
        stream: stays as it is until a draw is taken.
        room: `(LEVELS, vocab_size)` fp32 to be written over.

    Attributes:
        found: the greatest p / e of each node, and its token, `(T,)` each.
    """

    def __init__(
        self, probabilities: torch.Tensor, depths: Sequence[int], stream: RandomStream, room: torch.Tensor
    ) -> None:
        self._depths, self._stream = depths, stream
        num_levels = min(max(depths) + 1, LEVELS)
        self._states = [stream.state]
        for level in range(num_levels):  # one by one, as plain decoding draws them
            room[level : level + 1].exponential_(generator=stream.generator)
            self._states.append(stream.state)
        stream.state = self._states[0]
        own = torch.stack([room[min(depth, num_levels - 1)] for depth in depths])  # (T, vocab_size)
        greatest, tokens = (probabilities / own).max(dim=-1)
        self.found = greatest, tokens
        self._num_taken = 0

    def take(self, node: int, found: Sequence[float]) -> int | None:
        """The token drawn after `node`, whose part of `self.found` was read; `None` where it has to be drawn now.

        That is for nodes too deep, for probabilities that are no numbers, and where another thread has drawn since.
        """
        level, (greatest, token, *_) = self._num_taken, found
        if self._depths[node] != level or level + 1 >= len(self._states):
            return None
        if not greatest > 0.0 or not np.array_equal(self._stream.state.numpy(), self._states[level].numpy()):
            return None
        self._num_taken += 1
        self._stream.state = self._states[self._num_taken]
        return int(token)
