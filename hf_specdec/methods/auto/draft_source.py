"""A draft model as one of auto's sources: what it is asked next, and what it says of a search's nodes.

It has the target's tokenizer. Knows neither clocks nor models.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hf_specdec.common.tree import ANY_DEPTH, DraftTree, TreeBuilder
from hf_specdec.methods.auto.recycled_logits import NUM_LIKELIEST, Entry, best_tokens, entries_of
from hf_specdec.methods.auto.search import Likeliest, Search
from hf_specdec.methods.common.draft_scorer import DraftScorer
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors
from hf_specdec.methods.common.sampling import DrawNoise, LogitsProcessorFn, coupled, process_rows

UNLIKELIEST = -7.0  # evidence of tokens that are drawn all the same, where the noise of their draw is small
WIDTH = 10  # nodes scored by one forward of the draft model, at most


class DraftSource:
    """A draft model with the target's tokenizer.

    Args:
        scorer: the draft model with one row's text.
        logits_processor: the call's logits processors for the draft, when sampling.
    """

    def __init__(self, scorer: DraftScorer, logits_processor: LogitsProcessorFn | None = None) -> None:
        self.scorer, self.logits_processor = scorer, logits_processor
        self.start([0])

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text."""
        self.scorer.begin(prompt_ids)

    def start(self, text: Sequence[int], noise: DrawNoise | None = None, max_depth: int = ANY_DEPTH) -> None:
        """A step begins after `text`, with the noise of the draws to come where that is known.

        Args:
            max_depth: of the search; nodes that deep are not asked about, as none can follow them.
        """
        self._text, self._noise, self._request = text, noise, TreeBuilder(text[-1])
        self._max_depth = max_depth
        self._tree = DraftTree.chain(text[-1])  # what was requested last
        self._places: dict[int, int] = {}  # in the request, of the nodes that are in it
        self._wanted: list[int] = []

    def request(self, search: Search, likeliest: Likeliest) -> DraftTree | None:
        """Nodes that the draft model's next forward scores: the likeliest that it can and has not; `None` for none."""
        scored = self._places
        with_depths = zip(likeliest.nodes, likeliest.depths, strict=True)
        new = [node for node, depth in with_depths if node not in scored and depth < self._max_depth]
        wanted = [node for node in new if not node or search.parent(node) in scored]
        if not self.scorer.takes_trees and scored:
            last = next(reversed(scored))
            wanted = [node for node in wanted if search.parent(node) == last][:1]
        self._wanted = wanted[:WIDTH]
        if not wanted:
            return None
        for node in self._wanted:
            scored[node] = self._request.add(scored[search.parent(node)], search.token(node)) if node else 0
        self._tree = self._request.build()
        return self._tree

    def read(self, search: Search, rows: NodeLogits) -> None:
        """Tell the search what the draft model's logits say of the nodes that were requested last."""
        entries = best_tokens(rows) if self.logits_processor is None else self._drawn(rows.logits)
        for node, entry in zip(self._wanted, entries, strict=False):
            search.score(node, entry)

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The text goes on with `accepted`, after `tree` was verified."""
        self.scorer.keep(tree, accepted)

    def _drawn(self, rows: torch.Tensor) -> Sequence[Entry]:
        """The tokens that the draws to come most likely choose, with the probabilities that they are chosen from."""
        assert self.logits_processor is not None
        tree, places = self._tree, [self._places[node] for node in self._wanted]
        depths = [tree.depths[place] for place in places]

        def path_of(number: int) -> list[int]:
            return [tree.tokens[place] for place in tree.path(places[number])[1:]]

        scores = process_rows(self.logits_processor, rows, depths, self._text, path_of)
        if self._noise is None:
            return best_tokens(NodeLogits(scores))
        log_probs = scores.log_softmax(dim=-1, dtype=torch.float32)
        chosen = coupled(scores, depths, self._noise).topk(min(NUM_LIKELIEST, rows.shape[-1]), dim=-1).indices
        tokens, chosen_log_probs = read_tensors((chosen, log_probs.gather(-1, chosen)))
        return entries_of(tokens.astype(np.int64), chosen_log_probs, floor=UNLIKELIEST)
