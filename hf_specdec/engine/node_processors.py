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

from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.transfer import HOST, upload
from hf_specdec.tree import DraftTree

__all__ = ["ROUNDING", "NodeProcessors"]

ROW_WARPERS = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper)  # look at the row alone, round alike
CUMSUMS = (torch.Tensor.cumsum, torch.cumsum)
ROUNDING = 4e-6  # what the order of additions changes of a cumulative probability, at most


class NodeProcessors:
    """A call's processors for the nodes of trees; see `of`."""

    def __init__(self, processors: LogitsProcessorList, device: torch.device) -> None:
        self._processors = processors
        self._no_ids = torch.empty((1, 0), dtype=torch.long, device=device)

    @classmethod
    def of(cls, processors: LogitsProcessorList, device: torch.device) -> "NodeProcessors | None":
        """`None` where a processor has to be called for each token, in order."""
        return cls(processors, device) if all(map(_takes_all_nodes, processors)) else None

    def __call__(
        self, scores: torch.Tensor, tree: DraftTree, text: TokenBuffer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The nodes' processed scores, and how surely each row is what it would be alone.

        Args:
            scores: `(T, vocab_size)` fp32; not written over.
            text: what the tree's root ends.

        Returns:
            `(T, vocab_size)`, and `(T,)`: where no more than `ROUNDING`, a token may be kept or not by the order of
            additions. `None` where all rows are sure.
        """
        margins: torch.Tensor | None = None
        ids: torch.Tensor | None = None
        for processor in self._processors:
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                ids = _texts(tree, text) if ids is None else ids
                scores = processor(ids, scores)
            elif type(processor) is TopPLogitsWarper:
                with _CumulativeSums() as sums:
                    scores = processor(self._no_ids, scores)
                own = sums.distances(1.0 - processor.top_p, scores)  # (T,)
                margins = own if margins is None else torch.minimum(margins, own)
            else:
                scores = processor(self._no_ids, scores)
        return scores, margins


class _CumulativeSums(TorchFunctionMode):
    """Keeps the sums that a `TopPLogitsWarper` compares: CUDA adds up one row in another order than several."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in CUMSUMS:
            self._found.append(result)
        return result

    def distances(self, threshold: float, scores: torch.Tensor) -> torch.Tensor:
        """`(T,)`: from each row's sum that is nearest to the threshold; 0, no row being sure, where sums are not seen.

        Args:
            scores: `(T, vocab_size)`, which the warper gave.
        """
        if [sums.shape for sums in self._found] != [scores.shape]:
            return scores.new_zeros(len(scores))
        distances: torch.Tensor = torch.linalg.vector_norm(self._found[0] - threshold, ord=-float("inf"), dim=-1)
        return distances


def _takes_all_nodes(processor: Any) -> bool:
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return processor.prompt_ignore_length is None
    return type(processor) in (*ROW_WARPERS, TopPLogitsWarper)


def _texts(tree: DraftTree, text: TokenBuffer) -> torch.Tensor:
    """`(T, L + deepest)`: each node's text, filled up with the text's last token, which a penalty counts once."""
    ids, deepest = text.ids(), max(tree.depths)
    if not deepest:
        return ids
    paths = np.full((len(tree), deepest), tree.tokens[0])
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        if depth:
            paths[node] = paths[parent]
            paths[node, depth - 1] = tree.tokens[node]
    below = upload(torch.as_tensor(paths, device=HOST), ids.device)
    return torch.cat((ids.expand(len(tree), -1), below), dim=1)
