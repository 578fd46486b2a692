"""Samples every tree node on the accelerator, before the host knows which nodes are accepted; one transfer.

`torch.multinomial` draws one token as the argmax of p / e, e exponentially distributed. Which e a token takes depends
on how many tokens were drawn before it, its depth, and not on its node. So the draws of all nodes are made at once, and
the e of those that do not count are those of later draws.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.node_processors import NodeProcessors
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.rejections import Rejections
from hf_specdec.forward.text_rows import TokenBuffer

Array = npt.NDArray[Any]


class TokensAhead:
    """The tokens of one row, step by step.

    Args:
        stream: draws the row's samples; `None` for greedy decoding.
        noise: of the stream's draws; `None` where its device has no generator whose state is known.
    """

    def __init__(self, nodes: NodeProcessors, stream: RandomStream | None, noise: NoiseAhead | None = None) -> None:
        self._nodes, self._stream, self._noise = nodes, stream, noise
        self._tree = DraftTree.chain(0)
        self._probabilities: torch.Tensor | None = None  # (T, vocab_size) of the nodes
        self._num_drawn = 0  # of this step
        self._rejections: Rejections | None = None
        self._num_pairs = 0
        self._read: Sequence[Array] = ()
        self._pairs: Sequence[Array] = ()

    def find(self, logits: torch.Tensor, tree: DraftTree, text: TokenBuffer) -> tuple[torch.Tensor, ...]:
        """`(T, ...)` tensors to be read with the rest of the step.

        Args:
            logits: `(T, vocab_size)` of the tree's nodes.
            text: as it is before the step.
        """
        self._tree, self._num_drawn, self._rejections = tree, 0, None
        scores, pairs = self._nodes(logits.to(torch.float32), tree, text)
        self._num_pairs = len(pairs)
        if self._stream is None:
            return scores.argmax(dim=-1), *pairs
        self._probabilities = torch.nn.functional.softmax(scores, dim=-1)
        if tree.drafted_from:
            self._rejections = rejections_of(self._probabilities, tree, self._stream)
            return *self._rejections.result, *pairs
        if self._noise is None:
            return tuple(pairs)
        self._noise.vocab_size = scores.shape[-1]
        rows = [self._noise.row(depth) for depth in range(max(tree.depths) + 1)]
        noise = torch.stack([rows[depth] for depth in tree.depths])  # (T, vocab_size)
        greatest, tokens = (self._probabilities / noise).max(dim=-1)
        return greatest, tokens, *pairs, *self._noise.unread(max(tree.depths))

    def load(self, read: Sequence[Array]) -> None:
        """Take what was read of the tensors that `find` gave."""
        if self._noise is not None and self._rejections is None:
            read = self._noise.load(read)
        end = len(read) - self._num_pairs
        self._pairs, self._read = read[end:], read[:end]
        if self._rejections is not None:
            self._rejections.load(self._read)

    def token_after(self, node: int) -> int | None:
        """`None` where the token is not found, or not surely."""
        if not self._is_sure(node):
            return None
        if self._stream is None:
            return int(self._read[0][node])
        if self._rejections is not None:
            return self._rejections.token_after(node)
        if self._noise is None or self._num_drawn != self._tree.depths[node] or not self._noise.is_current:
            return None  # a token above was drawn alone, or another thread has drawn since
        greatest, tokens = self._read
        if not greatest[node] > 0.0:  # NaN of what is no probability, too
            return None
        self._num_drawn += 1
        self._noise.take()
        return int(tokens[node])

    def probabilities_after(self, node: int) -> torch.Tensor | None:
        """`(1, vocab_size)` to be drawn from; `None` where the processors have to be called for that."""
        if self._probabilities is None or not self._is_sure(node):
            return None
        return self._probabilities[node : node + 1]

    def _is_sure(self, node: int) -> bool:
        return all(least[node] == most[node] for least, most in zip(self._pairs[::2], self._pairs[1::2], strict=True))


def rejections_of(probabilities: torch.Tensor, tree: DraftTree, stream: RandomStream, first: int = 0) -> Rejections:
    """The tokens of the nodes from `first` on, as many as there are rows of `probabilities`."""
    nodes = range(first, first + len(probabilities))
    children = [next(iter(tree.children(node)), 0) for node in nodes]
    drafted_from = [
        (tree.drafted_from or {}).get(node) if child else None for node, child in zip(nodes, children, strict=True)
    ]
    drawn = [tree.tokens[child] for child in children]
    return Rejections(probabilities, drafted_from, drawn, stream.generator)
