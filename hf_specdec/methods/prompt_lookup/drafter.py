"""Prompt lookup: draft what followed the last tokens when they stood in the text before.

One place is copied from: the one after the longest matching text, the newest where several match equally; a short match
is followed less far, and any match where few of this text's drafts were accepted.
Source: https://github.com/apoorvumang/prompt-lookup-decoding; names and defaults of TensorRT-LLM's NGram.
"""

import math
from collections.abc import Callable, Sequence

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import TOKEN_COST, BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.ngrams import NgramIndex, NgramPool
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig

MOST_PLACES = 8  # occurrences of an n-gram looked at
MOST_MATCH = 16  # tokens in front of a place compared
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
        self._source = "text"  # of the last draft, for observers

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
        """Names the copied text, this one or an earlier one."""
        return tuple([DraftedNode(self._source)] * tree.num_draft_tokens)

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """A chain of at most `max_draft_len` tokens."""
        length = min(request.budget, self.config.max_draft_len)
        self._chances = []
        return DraftTree.chain(self.index.tokens[-1], self._chain(length, request.num_rows) if length > 0 else ())

    def _chain(self, length: int, num_rows: int) -> list[int]:
        """The tokens after the best place; where they run into the text's end, the copy goes on with itself."""
        text = self.index.tokens
        best = self._best_place(length)
        if best is None:
            return []
        source, place = best
        per_match = self.config.draft_len_per_match
        if per_match is not None:
            matching = source.match_length(place, text, MOST_MATCH)
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
        self._source = "text" if source is self.index else "earlier_texts"
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
            places = self._places(text[-size:], MOST_PLACES)
            if places:
                return max(
                    places,
                    key=lambda match: (
                        len(match[0]) - match[1] >= length,
                        match[0].match_length(match[1], text, MOST_MATCH),
                    ),
                )
        return None

    def _places(self, ngram: Sequence[int], limit: int) -> list[tuple[NgramIndex, int]]:
        """Places in this text, newest first; those of earlier texts only where this one has none."""
        places = self.index.places(ngram, limit)
        if places or self.pool is None:
            return [(self.index, place) for place in places]
        return self.pool.search(ngram, limit=limit)
