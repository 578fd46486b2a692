"""A draft model as one of auto's sources: what it is asked next, and what it says of a search's nodes.

`DraftSource` asks one that has the target's tokenizer about the likeliest nodes. `TranslatedSource` lets one with a
tokenizer of its own write on in its own vocabulary, and tells the search what that is in the target's.
Knows neither clocks nor models.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from hf_specdec.common.tree import ANY_DEPTH, DraftTree, TreeBuilder
from hf_specdec.methods.auto.adaptive_weights import MOST
from hf_specdec.methods.auto.recycled_logits import NUM_LIKELIEST, Entry, best_tokens, entries_of, log_odds
from hf_specdec.methods.auto.search import Search
from hf_specdec.methods.auto.sources import Likeliest
from hf_specdec.methods.common.draft_scorer import DraftScorer
from hf_specdec.methods.common.draw_noise import DrawNoise, coupled
from hf_specdec.methods.common.node_logits import NodeLogits, read_tensors
from hf_specdec.methods.common.processed_rows import LogitsProcessorFn, process_rows
from hf_specdec.methods.common.translation import Translation

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
        self._entries: Sequence[Entry] = ()  # for those wanted last, until they are told

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

    def read(self, rows: NodeLogits) -> None:
        """The draft model's logits for what was requested last."""
        self._entries = best_tokens(rows) if self.logits_processor is None else self._drawn(rows.logits)

    def tell(self, search: Search) -> bool:
        """Tell the search what is known of its nodes; whether that was anything new."""
        entries, self._entries = self._entries, ()
        for node, entry in zip(self._wanted, entries, strict=False):
            search.score(node, entry)
        return bool(entries)

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


class TranslatedSource:
    """A draft model with a tokenizer of its own, which writes one continuation of the text a step.

    The continuation is translated after every forward. A token of the target has the probability of those of the draft
    that it takes to be written; where the next one changes it, as `th` becomes `the`, both stay on offer.

    Args:
        scorer: the draft model, with the fixed tokens of `translation` as its text.
        translation: this row's text in both vocabularies; it has begun.
    """

    def __init__(self, scorer: DraftScorer, translation: Translation) -> None:
        self.scorer, self.translation = scorer, translation
        self._unread: list[int] = []  # tokens of the target, of the text, that the translation has not seen
        self._verified: DraftTree | None = None
        self.start([0])

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text; the translation has its prompt."""
        self.scorer.begin(self.translation.fixed)

    def start(self, text: Sequence[int], noise: DrawNoise | None = None, max_depth: int = ANY_DEPTH) -> None:
        """A step begins after `text`. The noise is of the target's vocabulary, and not used."""
        self._max_depth = max_depth
        self._longest = 0  # tokens of the target that it has written
        self._chain: list[int] = []  # the draft's tokens after the tail
        self._probability = 1.0  # of all of them
        self._paths: dict[tuple[int, ...], float] = {(): 1.0}  # in the target's tokens, with their probabilities
        self._following: dict[tuple[int, ...], dict[int, float]] = {}  # tokens after each, with their probabilities
        self._num_told: dict[tuple[int, ...], int] = {}  # tokens that the search knows to follow each

    def request(self, search: Search, likeliest: Likeliest) -> DraftTree | None:
        """Tokens that the draft model's next forward reads, the text's tail and its own; `None` after its end."""
        self._catch_up()
        text = self.translation
        if (self._chain and text.ends(self._chain[-1])) or self._longest > self._max_depth:  # the last one may change
            return None
        if len(text.tail) + len(self._chain) > self.scorer.room():
            return None
        return DraftTree.chain(text.fixed[-1], [*text.tail, *self._chain])

    def read(self, rows: NodeLogits) -> None:
        """The draft model's logits over its own vocabulary; the last ones say how it goes on."""
        tokens, log_probs = rows.top(1, slice(-1, None))
        self._chain.append(int(tokens[0, 0]))
        self._probability *= math.exp(log_probs[0, 0])
        path = tuple(self.translation.drafted(self._chain))
        self._longest = max(self._longest, len(path))
        for end in range(1, len(path) + 1):
            if path[:end] not in self._paths:
                before, self._paths[path[:end]] = self._paths[path[: end - 1]], self._probability
                share = min(self._probability / before, MOST) if before else 0.0
                self._following.setdefault(path[: end - 1], {})[path[end - 1]] = share

    def tell(self, search: Search) -> bool:
        """Tell the search what is known of its nodes; whether that was anything new."""
        is_new = False
        for path, following in self._following.items():
            node = _node_at(search, path)
            if node is not None and self._num_told.get(path) != len(following):
                self._num_told[path], is_new = len(following), True
                search.score(node, (list(following), log_odds(np.array([*following.values()])).tolist()))
        return is_new

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The text goes on with `accepted`; where the draft model was not asked, they are translated when it is."""
        self._unread += accepted
        self._verified = tree
        if self._chain:
            self._chain = []
            self._catch_up()

    def _catch_up(self) -> None:
        """Translate what the text gained, and let the draft model keep it."""
        if self._unread:
            unread, self._unread = self._unread, []
            assert self._verified is not None
            self.scorer.keep(self._verified, self.translation.extend(unread))


AnyDraftSource = DraftSource | TranslatedSource


def draft_source_of(
    scorer: DraftScorer | None, translation: Translation | None, logits_processor: LogitsProcessorFn | None = None
) -> AnyDraftSource | None:
    """The source that a draft model is; `None` where there is none.

    Args:
        translation: the row's text in the draft model's vocabulary, where that is another one.
        logits_processor: the call's logits processors for the draft model, when sampling.
    """
    if scorer is None:
        return None
    return DraftSource(scorer, logits_processor) if translation is None else TranslatedSource(scorer, translation)


def _node_at(search: Search, path: Sequence[int]) -> int | None:
    """The search's node at the end of `path` below the root; `None` where there is none yet."""
    node = 0
    for token in path:
        node = search.child(node, token)
        if node < 0:
            return None
    return node
