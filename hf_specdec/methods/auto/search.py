"""The tree of one step: nodes that the target most likely accepts, found best first, and what is learned from them.

A search reads, from long contexts to short ones: where the context stood before in this text and in earlier ones, and
the target's recycled logits after the last three, two and one tokens; where there are none, the text's commonest
tokens; what was likely in the place of the last token, since words that were left out often follow; and what a draft
model says, which has the target's tokenizer, where it has been asked. Nodes are numbered as they are first drafted; the
root is 0. The compiled core searches. Knows neither clocks nor models.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.common.stats import SourceVote
from hf_specdec.common.tree import ANY_DEPTH, DraftTree, TreeBuilder
from hf_specdec.kernels import native
from hf_specdec.methods.auto.recycled_logits import FLOOR, MAX_KEY, NUM_LIKELIEST, Entry, best_tokens, entries_of
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.draft_scorer import DraftScorer
from hf_specdec.methods.common.ngrams import NgramIndex
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors
from hf_specdec.methods.common.sampling import DrawNoise, LogitsProcessorFn, coupled, process_rows

NoiseRow = npt.NDArray[Any]  # (vocab_size,) fp32 of one draw, see `methods/common/sampling.py`
Said = Sequence[tuple[int, Entry]]  # what each source that knows a context says, by its place

PRIOR_COUNT = 4.0  # accepted tokens as which an unknown text counts
MOST_TRUST = 1.3
UNLIKELIEST = -7.0  # evidence of tokens that are drawn all the same, where the noise of their draw is small
WIDTH = 10  # nodes scored by one forward of the draft model, at most
THIS_TEXT, POOLED, RECYCLED = 0, 1, 2  # places of the sources in a row of evidence
COMMON, DRAFT, SIBLINGS = range(RECYCLED + MAX_KEY, RECYCLED + MAX_KEY + 3)
NAMES: Mapping[int, str] = {  # but for the draft's, which a call brings
    THIS_TEXT: "text",
    POOLED: "earlier_texts",
    **{RECYCLED + place: "recycled_logits" for place in range(MAX_KEY)},
    COMMON: "text",
    SIBLINGS: "recycled_logits",
}


class Likeliest(NamedTuple):
    """The likeliest nodes in the order of their probabilities, the root first, each after its parent.

    Attributes:
        nodes (`list[int]`): their numbers in the search.
        tokens (`tuple[int, ...]`): token of each.
        parents (`tuple[int, ...]`): place of each one's parent in these lists; -1 for the root.
        probabilities (`tuple[float, ...]`): that the target accepts it and all before it.
        depths (`tuple[int, ...]`): distance of each from the root.
    """

    nodes: list[int]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    depths: tuple[int, ...]

    def child(self, place: int, token: int) -> int | None:
        """Place of the node below `place` that holds `token`, if there is one."""
        below = range(place + 1, len(self.tokens))
        return next((node for node in below if self.parents[node] == place and self.tokens[node] == token), None)


class Sources:
    """Sources of one text.

    Args:
        memory: recycled logits and what was learned about the sources, this text's alone or shared.
        is_sampled: whether tokens are drawn: other weights, since unlikely tokens come true more often.
        uses_texts: whether earlier texts take part.
        draft_source: what the draft is called in votes.

    Attributes:
        record (`array`): tokens of this text expected and accepted, faded.
    """

    def __init__(
        self,
        memory: SpecMemory,
        *,
        is_sampled: bool,
        uses_texts: bool = True,
        draft_source: str = "draft_model",
    ) -> None:
        self.pool = memory.pool if uses_texts else None
        self.recycled = memory.recycled
        self.learned = memory.adaptive_weights(is_sampled)
        self.record = array("d", [PRIOR_COUNT, PRIOR_COUNT])
        self._names = {**NAMES, DRAFT: draft_source}

    @property
    def trust(self) -> float:
        """Accepted tokens of this text over those expected, at most 1.3.

        What was learned from other texts says little of one that is drawn at another temperature.
        """
        expected, accepted = self.record
        return min(MOST_TRUST, (accepted + PRIOR_COUNT) / (expected + PRIOR_COUNT))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Earlier texts, recycled logits and what was learned, for the compiled core; `None` for what takes no part."""
        young, old = (None, None) if self.pool is None else [index.arrays for index in self.pool.indexes]
        return young, old, self.recycled.arrays, (*self.learned.arrays, self.record)

    def votes(self, token: int, said: Said, weights: Sequence[float]) -> tuple[SourceVote, ...]:
        """Get what each source that knows `token` said of it, the one that added most first."""
        votes = []
        for place, (tokens, evidence) in said:
            if token in tokens:
                value = evidence[tokens.index(token)]
                probability = 1.0 / (1.0 + math.exp(FLOOR - value))
                votes.append(SourceVote(self._names[place], probability, weights[place] * value))
        return tuple(sorted(votes, key=lambda vote: -vote.weight))


class Search:
    """The search of one step, in the compiled core.

    Args:
        sources: know what follows a context.
        index: the text; its last token is the root.
        takes_trees: whether siblings are verified; where not, a chain is grown.
        max_depth: nodes one under the other, the root apart, at most.
        noise: of the draws after the nodes of depth 0, 1, ... as far as it is known.

    Attributes:
        token, parent, child, probability: of a node's number the token that it holds, the node above it, -1 for the
            root, the node below it that holds a token, -1 where none was drafted, and the probability that the target
            accepts it and all before it, as last drafted.
        value: of a list of nodes, the root first, the expected accepted tokens by what is known now.
    """

    def __init__(
        self,
        sources: Sources,
        index: NgramIndex,
        *,
        takes_trees: bool = True,
        max_depth: int = ANY_DEPTH,
        noise: Sequence[NoiseRow] = (),
    ) -> None:
        assert native.core is not None
        self._sources = sources
        young, old, recycled, learned = sources.arrays
        texts, common = (index.arrays, young, old), index.common.arrays
        self._search = native.core.Search(*texts, recycled, learned, common, takes_trees, max_depth, tuple(noise))
        self.token, self.parent = self._search.token, self._search.parent
        self.child, self.probability = self._search.child, self._search.probability
        self.value = self._search.value

    def likeliest(self, budget: int, floor: float) -> Likeliest:
        """Find at most `budget` nodes below the root, none of a probability below `floor`."""
        return Likeliest(*self._search.likeliest(budget, floor))

    def votes(self, node: int, token: int) -> tuple[SourceVote, ...]:
        """Get what each source that knows `token` said of it after `node`, the one that added most first."""
        said, weights = self._search.said(node)
        return self._sources.votes(token, [(place, (tokens, evidence)) for place, tokens, evidence in said], weights)

    def score(self, node: int, entry: Entry) -> None:
        """Take what the draft model says of `node`."""
        self._search.score(node, list(entry[0]), list(entry[1]))

    def follow(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn every token that the text went on with, down the verified `tree`."""
        self._search.follow(tree.tokens, tree.parents, accepted)


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
