"""The choice of the next token from a logits row, exactly as plain decoding makes it.

One call of the processors and one draw for each emitted token, in order. On an accelerator the tokens of all nodes of a
tree are found before the host knows which nodes are accepted: `torch.multinomial` draws one token as the argmax of
p / e, e exponentially distributed, and which e a token takes depends on how many tokens were drawn before it, its
depth. So all draws are made at once, and the e of those that do not count are those of later draws.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specdec.common.transfer import is_host
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.generation import in_order
from hf_specdec.engine.sampling.constraint import Constraint
from hf_specdec.engine.sampling.node_processors import NodeProcessors
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.per_row import PerRow, processors_of_row
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.rejections import Rejections
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors

Array = npt.NDArray[Any]


class Sampler:
    """Chooses one row's tokens and keeps what `return_dict_in_generate` wants to see of them.

    Args:
        generator: draws the row's samples; `None` is the global generator, as in plain decoding.

    Attributes:
        scores, logits: one `(1, vocab_size)` tensor a token, processed and raw; `None` where no one asked.
        keeps (`bool`): whether there are any.
        constraint (`Constraint | None`): the processor among them that drafts follow too.
        needs_rows (`bool`): whether a token is more than the place of its row's maximum.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> None:
        if type(processors) is LogitsProcessorList and any(isinstance(item, PerRow) for item in processors):
            processors = processors_of_row(processors, 0)
        self.processors, self.device, self.generator = in_order(processors), device, generator
        self.constraint = next((item for item in processors if isinstance(item, Constraint)), None)
        self.do_sample = bool(config.do_sample)
        wants = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None
        self.keeps, computes = self.scores is not None or self.logits is not None, self.do_sample or len(processors) > 0
        self.needs_rows = self.keeps or computes
        nodes = NodeProcessors.of(processors, device) if computes and not self.keeps else None
        self._stream = RandomStream(device, generator) if self.do_sample else None
        self._noise = None if self._stream is None else NoiseAhead.of(self._stream)
        self._ahead = None if nodes is None else TokensAhead(nodes, self._stream, self._noise)
        self._is_ahead = False
        self._rows = NodeLogits(torch.empty(0))
        self._tree: DraftTree | None = None

    @property
    def draws_globally(self) -> bool:
        """Returns whether the text's random numbers are those of the global generator."""
        return self.do_sample and self.generator is None

    @property
    def noise(self) -> NoiseAhead | None:
        """The random numbers of the draws to come; `None` where nothing is drawn, and before the prompt is read."""
        return self._noise if self._noise is not None and self._noise.vocab_size else None

    @property
    def noise_seconds(self) -> float:
        """Seconds that the random numbers of its draws have taken on the host."""
        return 0.0 if self._noise is None else self._noise.seconds

    def expect(self, tree: DraftTree) -> None:
        """The next step computes this tree."""
        self._tree, self._is_ahead = tree, False

    def choose_ahead(self, logits: torch.Tensor, text: TokenBuffer) -> tuple[torch.Tensor, ...] | None:
        """Samples every tree node on the accelerator; the tokens are read with the rest of the step.

        Args:
            logits: `(C, vocab_size)` of the step.
            text: as it is before the step.

        Returns:
            As `TokensAhead.find`; `None` where a processor has to be called for each token.
        """
        if self._ahead is None or self._tree is None or logits.device != self.device:
            return None
        self._is_ahead = True
        return self._ahead.find(logits[: len(self._tree)], self._tree, text)

    def load(self, rows: NodeLogits) -> None:
        """Take what was read of the step."""
        self._rows = rows
        if self._noise is not None:
            self._noise.vocab_size = rows.logits.shape[-1]
        if self._is_ahead and self._ahead is not None:
            self._ahead.load(rows.chosen)

    def choose(self, node: int, text: TokenBuffer) -> int:
        """The token after `text`, decided by the row of `node`."""
        if not self.needs_rows:
            return self._rows.best_at(node)
        if self._is_ahead and self._ahead is not None:
            if (token := self._ahead.token_after(node)) is not None:
                return token
            if (probabilities := self._ahead.probabilities_after(node)) is not None:
                return self._draw(node, probabilities)
        scores = self._scores_after(node, text)
        if self.do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            return self._draw(node, probabilities)
        return int(torch.argmax(scores, dim=-1))

    def _scores_after(self, node: int, text: TokenBuffer) -> torch.Tensor:
        """`(1, vocab_size)`: the row of `node` after the processors."""
        row = self._rows.logits[node : node + 1].to(copy=True, dtype=torch.float32, device=self.device)
        scores = self.processors(text.ids(), row)
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(row)
        return scores

    def _draw(self, node: int, probabilities: torch.Tensor) -> int:
        """One draw, as plain decoding does it; after a node with drawn children, the draw that favours them."""
        assert self._tree is not None and self._stream is not None
        if node in (self._tree.drafted_from or {}) and self._tree.children(node):
            rejections = rejections_of(probabilities, self._tree, self._stream, node)
            rejections.load(tuple(read_tensors(rejections.result)))
            if (token := rejections.token_after(0)) is not None:
                return token
        made_ahead = self._noise.draw(probabilities) if self._noise is not None and is_host(self.device) else None
        if made_ahead is not None:
            return made_ahead
        return int(torch.multinomial(probabilities, num_samples=1, generator=self.generator))


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
