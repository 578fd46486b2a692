"""The choice of the next token from a logits row, exactly as plain decoding makes it.

One call of the processors and one draw for each emitted token, in order.
"""

import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specdec.common.transfer import is_host
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.generation import in_order
from hf_specdec.engine.sampling.constraint import Constraint
from hf_specdec.engine.sampling.node_processors import NodeProcessors
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.per_row import PerRow, of_only_row
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.tokens_ahead import TokensAhead, rejections_of
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors


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
            processors = LogitsProcessorList(of_only_row(processors))
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
