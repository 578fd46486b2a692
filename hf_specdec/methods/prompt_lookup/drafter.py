"""Prompt lookup: draft what followed the last tokens when they stood in the text before.

A chain copies from one place: the one after the longest matching text, the newest where several match equally; a
short match is followed less far, and any match where few of this text's drafts were accepted.
A tree asks at every node where its last tokens stood before and lets those places vote for the next token; nodes are
added best first, by the product of the votes along their path.
Source: https://github.com/apoorvumang/prompt-lookup-decoding; names and defaults of TensorRT-LLM's NGram.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from hf_specdec.common.observer import DraftedNode
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.drafter import TOKEN_COST, BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.ngram.index import NgramIndex
from hf_specdec.methods.common.ngram.pool import NgramPool
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig

CHAIN_PLACES, TREE_PLACES = 8, 16  # occurrences of an n-gram looked at
CHAIN_MATCH, TREE_MATCH = 16, 8  # tokens in front of a place compared
SMOOTHING_COUNT = 6.0  # votes shared by the commonest tokens: a place matching m tokens has m * m votes
POOL_WEIGHT = 0.1  # a place in an earlier text against one in this text
PSEUDO_COUNT = 2.15  # a match of m tokens goes on with the chance m / (m + this): 0.3 for 1, 0.5 for 2, 0.8 for 8
PRIOR_COUNT = 1.0  # tokens, expected and accepted, that a text's record starts with
FADE = 0.98  # of the record, a step


class PromptLookupDrafter(BaseDrafter):
    """Drafts from this text and, with `pool`, from earlier ones.

    Args:
        config: see `PromptLookupConfig`.
        pool: texts of earlier calls; the finished text is added to it.
        token_cost: what a drafted token more a row adds to a forward of so many rows, over that of one token a row,
            where a row has so many drafted tokens.
        jump: what a forward of several tokens a row adds to that, whatever their number; also by rows.
    """

    def __init__(
        self,
        config: PromptLookupConfig,
        pool: NgramPool | None = None,
        *,
        token_cost: Callable[[int, int], float] = lambda num_rows, num_nodes: TOKEN_COST,
        jump: Callable[[int], float] = lambda num_rows: 0.0,
    ) -> None:
        self.config, self.pool, self.token_cost, self.jump = config, pool, token_cost, jump
        self.index = NgramIndex(config.max_matching_ngram_size)
        self._expected = self._accepted = 0.0  # drafted tokens of this text, by their chances and by what came of them
        self._chances: list[float] = []  # of the last chain's tokens to be accepted, before this text's record
        self._proposed: DraftTree | None = None  # the last draft, for observers
        self._origins: list[tuple[bool, float | None]] = []  # of its nodes: whether this text has it, and the votes

    @property
    def assisted_budget(self) -> int:
        """Most tokens drafted a step inside transformers' loop."""
        return self.config.max_draft_len

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt."""
        self.index = NgramIndex(self.config.max_matching_ngram_size)
        self.index.extend(prompt_ids)
        self._expected = self._accepted = 0.0
        self._chances = []

    def learn_from(self, result: DraftResult) -> None:
        """Index the new tokens, and note how many of the chain's were accepted."""
        chances, accepted = self._chances[: result.tree.num_draft_tokens], result.accepted
        self._expected = FADE * self._expected + sum(chances)
        self._accepted = FADE * self._accepted + min(len(accepted) - 1, len(chances))
        self.index.extend(accepted)

    def end(self) -> None:
        """Hand the text to the pool; a second call adds nothing."""
        if self.pool is not None and len(self.index):
            self.pool.add(self.index.tokens)
            self.index = NgramIndex(self.config.max_matching_ngram_size)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """Names the copied text, this one or an earlier one; in a tree also the votes' estimate."""
        assert self._proposed is not None
        origins = [self._origins[node - 1] for node in tree.nodes_in(self._proposed)[1:] if node]
        return tuple([DraftedNode("text" if is_own else "earlier_texts", share) for is_own, share in origins])

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """A chain of at most `max_draft_len` tokens, or a tree of at most `node_budget`."""
        root = self.index.tokens[-1]
        budget = min(request.budget, self.config.node_budget)
        self._origins, self._chances = [], []
        if budget < 1:
            self._proposed = DraftTree.chain(root)
        elif self.config.num_branches == 1:
            length = min(budget, self.config.max_draft_len)
            self._proposed = DraftTree.chain(root, self._chain(length, request.num_rows))
        else:
            self._proposed = self._tree(budget)
        return self._proposed.first_branch_first()

    def _chain(self, length: int, num_rows: int) -> list[int]:
        """The tokens after the best place; where they run into the text's end, the copy goes on with itself."""
        text = self.index.tokens
        best = self._best_place(length)
        if best is None:
            return []
        source, place = best
        per_match = self.config.draft_len_per_match
        if per_match is not None:
            matching = source.match_length(place, text, CHAIN_MATCH)
            if per_match == "auto":
                self._chances = self._chances_above_cost(matching, num_rows)[:length]
                length = len(self._chances)
            else:
                length = min(length, matching * per_match)
        drafted: list[int] = []
        for position in range(place, place + length):
            if position < len(source):
                token = source.tokens[position]
            elif source is self.index:
                token = drafted[position - len(text)]
            else:
                break
            if token < 0:  # the end of an earlier text
                break
            drafted.append(token)
        self._origins = [(source is self.index, None)] * len(drafted)
        return drafted

    def _chances_above_cost(self, matching: int, num_rows: int) -> list[float]:
        """The chances of the tokens after a match, as far as each is worth its cost, if all are worth `jump`."""
        chances: list[float] = []
        probability, gain = 1.0, 0.0
        trust = min(1.0, (self._accepted + PRIOR_COUNT) / (self._expected + PRIOR_COUNT))
        while len(chances) < self.config.max_draft_len:
            size = matching + len(chances)
            probability *= size / (size + PSEUDO_COUNT)
            # rows are as wide as the widest: the mean of what a token costs where all draft, and where one does
            least = math.sqrt(num_rows) * self.token_cost(num_rows, len(chances) + 1)
            if trust * probability < least:
                break
            chances.append(probability)
            gain += trust * probability - least
        return chances if gain > self.jump(num_rows) else []

    def _best_place(self, length: int) -> tuple[NgramIndex, int] | None:
        """Chooses a place of the longest n-gram that is found: full continuations, then long matches, then new ones."""
        text = self.index.tokens
        for size in range(min(self.config.max_matching_ngram_size, len(text)), 0, -1):
            places = self._places(text[-size:], CHAIN_PLACES)
            if places:
                return max(
                    places,
                    key=lambda match: (
                        len(match[0]) - match[1] >= length,
                        match[0].match_length(match[1], text, CHAIN_MATCH),
                    ),
                )
        return None

    def _places(self, ngram: Sequence[int], limit: int) -> list[tuple[NgramIndex, int]]:
        """Places in this text, newest first; those of earlier texts only where this one has none."""
        places = self.index.places(ngram, limit)
        if places or self.pool is None:
            return [(self.index, place) for place in places]
        return self.pool.search(ngram, limit=limit)

    def _tree(self, budget: int) -> DraftTree:
        """Best-first growth; at most `num_branches` children a node, none deeper than `max_draft_len`."""
        config = self.config
        builder = TreeBuilder(self.index.tokens[-1])
        context = list(self.index.tokens[-TREE_MATCH:])
        common = self.index.common.shares()
        # (-probability, order of arrival, parent, token, the drafted tokens up to this one, whether this text has it)
        waiting: list[tuple[float, int, int, int, list[int], bool]] = []
        arrivals = 0
        node, probability, path = 0, 1.0, list[int]()
        while True:
            if len(path) < config.max_draft_len:
                for token, share, is_own in self._votes(context + path, common):
                    arrivals += 1
                    heapq.heappush(waiting, (-probability * share, arrivals, node, token, [*path, token], is_own))
            if not waiting or len(builder) > budget:
                return builder.build()
            negative, _, parent, token, path, is_own = heapq.heappop(waiting)
            node, probability = builder.add(parent, token), -negative
            self._origins.append((is_own, probability))

    def _votes(self, context: list[int], common: Mapping[int, float]) -> Iterable[tuple[int, float, bool]]:
        """The likeliest next tokens after `context`, their estimated probabilities, and whether this text has them."""
        votes: dict[int, float] = {}
        of_text = set(common)
        total = SMOOTHING_COUNT
        seen: set[tuple[int, int]] = set()
        for size in range(min(self.config.max_matching_ngram_size, len(context)), 0, -1):
            ngram = context[-size:]
            places = [(self.index, place, 1.0) for place in self.index.places(ngram, TREE_PLACES)]
            if self.pool is not None:
                places += [(index, place, POOL_WEIGHT) for index, place in self.pool.search(ngram, limit=TREE_PLACES)]
            for source, place, weight in places:
                if (id(source), place) in seen:
                    continue
                seen.add((id(source), place))
                vote = weight * source.match_length(place, context, TREE_MATCH) ** 2
                token = source.tokens[place]
                votes[token] = votes.get(token, 0.0) + vote
                total += vote
                if source is self.index:
                    of_text.add(token)
        for token, share in common.items():
            votes[token] = votes.get(token, 0.0) + SMOOTHING_COUNT * share
        best = sorted(votes.items(), key=lambda item: -item[1])[: self.config.num_branches]
        return [(token, vote / total, token in of_text) for token, vote in best]
