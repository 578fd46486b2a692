"""Logits processors over all nodes of a step at once: each is a few launches on an accelerator, one token or many.

Only processors are called so that leave each row as they leave it alone, bit for bit, or say where they may not.
"""

from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.common.transfer import HOST, upload
from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.constraint import Constraint
from hf_specdec.forward.text_rows import TokenBuffer

ROW_WARPERS = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper)  # look at the row alone, round alike
CUMSUMS = (torch.Tensor.cumsum, torch.cumsum)
MIN_ROOM = 64  # rows of bounds that are sent at once
ROUNDING = 4e-6  # what the order of additions changes of a cumulative probability, at most


class NodeProcessors:
    """A call's processors for the nodes of trees; see `of`."""

    def __init__(self, processors: LogitsProcessorList, device: torch.device) -> None:
        self._processors = list(processors)
        self._no_ids = torch.empty((1, 0), dtype=torch.long, device=device)
        self._bounds: dict[float, torch.Tensor] = {}  # of each top_p, as `_around` has them
        self._text: TokenBuffer | None = None  # of which the first tokens are known
        self._num_known, self._largest = 0, -1

    @classmethod
    def of(cls, processors: LogitsProcessorList, device: torch.device) -> "NodeProcessors | None":
        """`None` where a processor has to be called for each token, in order."""
        return cls(processors, device) if all(map(takes_all_nodes, processors)) else None

    def __call__(
        self, scores: torch.Tensor, tree: DraftTree, text: TokenBuffer
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The nodes' processed scores, and which rows are surely what they would be alone.

        Args:
            scores: `(T, vocab_size)` fp32; not written over.
            text: what the tree's root ends.

        Returns:
            `(T, vocab_size)`, and pairs of `(T,)`: where the two of a pair differ, a token may be kept or not by the
            order of additions. No pairs where all rows are sure.
        """
        pairs: list[torch.Tensor] = []
        ids: torch.Tensor | None = None
        for processor in self._processors:
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                ids = _texts(tree, text) if ids is None else ids
                if max(self._largest_id(text), *tree.tokens) < scores.shape[-1]:
                    scores = _penalized(ids, scores, processor.penalty)
                else:
                    scores = processor(ids, scores)
            elif isinstance(processor, Constraint):
                scores = processor.mask_nodes(scores, tree, text.tokens)
            elif type(processor) is TopPLogitsWarper:
                with _CumulativeSums() as sums:
                    scores = processor(self._no_ids, scores)
                pairs += sums.below(self._around(1.0 - processor.top_p, len(scores), scores.device), scores)
            else:
                scores = processor(self._no_ids, scores)
        return scores, pairs

    def _largest_id(self, text: TokenBuffer) -> int:
        """Largest id of the text, which grows by tokens that were not read yet."""
        if text is not self._text:
            self._text, self._num_known, self._largest = text, 0, -1
        self._largest = max([self._largest, *text.tokens[self._num_known :]])
        self._num_known = len(text.tokens)
        return self._largest

    def _around(self, threshold: float, count: int, device: torch.device) -> torch.Tensor:
        """`(count, 2)`: what is surely less than the threshold, and what is surely more."""
        bounds = self._bounds.get(threshold)
        if bounds is None or len(bounds) < count:
            both = torch.tensor([threshold - ROUNDING, threshold + ROUNDING], device=HOST)
            bounds = self._bounds[threshold] = upload(both.repeat(max(count, MIN_ROOM), 1), device)
        return bounds[:count]


class _CumulativeSums(TorchFunctionMode):
    """Keeps the sums that a `TopPLogitsWarper` compares: CUDA adds up one row in another order than several."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in CUMSUMS:
            self._sums.append(result)
        return result

    def below(self, bounds: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`(T,)` for each bound: how many of a row's sums, which ascend, are less; unlike where sums are not seen.

        Args:
            bounds: `(T, 2)`.
            scores: `(T, vocab_size)`, which the warper gave.
        """
        if [sums.shape for sums in self._sums] != [scores.shape]:
            return scores.new_zeros(len(scores)), scores.new_ones(len(scores))
        return torch.searchsorted(self._sums[0], bounds).unbind(dim=-1)


def reads_ids(processor: Any) -> bool:
    """Processors of all nodes that read the texts."""
    return type(processor) is RepetitionPenaltyLogitsProcessor


def takes_all_nodes(processor: Any) -> bool:
    """Returns whether a processor treats each row as it treats it alone."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return processor.prompt_ignore_length is None
    return type(processor) in (*ROW_WARPERS, TopPLogitsWarper) or isinstance(processor, Constraint)


def _penalized(ids: torch.Tensor, scores: torch.Tensor, penalty: float) -> torch.Tensor:
    """Scores of a `RepetitionPenaltyLogitsProcessor` in fewer operations, where the vocabulary holds all ids."""
    seen_scores = scores.gather(1, ids)  # (T, L), multiplied below 0, else divided: the lesser for a penalty above 1
    chosen = torch.minimum if penalty >= 1.0 else torch.maximum
    return scores.scatter(1, ids, chosen(seen_scores * penalty, seen_scores / penalty))


def _texts(tree: DraftTree, text: TokenBuffer) -> torch.Tensor:
    """`(T, L + deepest)`: each node's text, filled up with the text's last token, which a penalty counts once."""
    (ids, rest), deepest = text.parts(), max(tree.depths)
    if not deepest and not rest:
        return ids
    paths = np.full((len(tree), len(rest) + deepest), tree.tokens[0])
    paths[:, : len(rest)] = rest
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        if depth:
            paths[node] = paths[parent]
            paths[node, len(rest) + depth - 1] = tree.tokens[node]
    below = upload(torch.as_tensor(paths, device=HOST), ids.device)
    return torch.cat((ids.expand(len(tree), -1), below), dim=1)
