"""The tokens that a step's nodes would draw, found on the device before the host knows which of them are reached.

`torch.multinomial` draws one token as the argmax of p / e, e exponentially distributed. Which e a token takes depends
on how many tokens were drawn before it, its depth, and not on its node. So the draws of some levels are made for all
nodes and read with the rest of a step; the e of those that do not count are those of later draws.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead

Array = npt.NDArray[Any]
LEVELS = 3  # drawn ahead: each is a launch in a text's first step; a further read brings as many more


class DrawsAhead:
    """The draws of one text after `first` and the nodes below it.

    Args:
        probabilities: `(T, vocab_size)` fp32 of the tree's nodes.
        noise: of the text; its stream stays as it is until a draw is taken.
        first: the node whose token is drawn next.

    Attributes:
        result: `(N,)` each, N nodes from `first` on: the greatest p / e and its token.
    """

    def __init__(self, probabilities: torch.Tensor, tree: DraftTree, noise: NoiseAhead, *, first: int = 0) -> None:
        self._levels, self._noise, self._first = _levels_below(tree, first), noise, first
        self._num_taken = 0
        noise.vocab_size = probabilities.shape[-1]
        rows = [noise.row(level) for level in range(max(self._levels.values()) + 1)]
        last = max(self._levels)
        noise_of_nodes = torch.stack(
            [rows[self._levels.get(node, 0)] for node in range(first, last + 1)]
        )  # (N, vocab_size)
        self.result: tuple[torch.Tensor, ...] = (probabilities[first : last + 1] / noise_of_nodes).max(dim=-1)
        self._read: Sequence[Array] = ()

    def load(self, read: Sequence[Array]) -> None:
        """Take what was read of `result`."""
        self._read = read

    def at(self, node: int) -> tuple[float, int] | None:
        """The greatest p / e after `node` and its token; `None` where it is drawn for later.

        That is for nodes too deep, and where another thread has drawn since.
        """
        if self._levels.get(node) != self._num_taken or not self._noise.is_current:
            return None
        ratios, tokens = self._read
        return float(ratios[node - self._first]), int(tokens[node - self._first])

    def take(self, node: int) -> None:
        """The token after `node` is drawn: the stream goes on where plain decoding leaves it."""
        assert self._levels[node] == self._num_taken
        self._num_taken += 1
        self._noise.take()


def _levels_below(tree: DraftTree, first: int) -> dict[int, int]:
    """For `first` and the nodes below it how many tokens are drawn before theirs, where that is less than `LEVELS`."""
    levels = {first: 0}
    for node in range(first + 1, len(tree)):
        above = levels.get(tree.parents[node], LEVELS)
        if above + 1 < LEVELS:
            levels[node] = above + 1
    return levels
