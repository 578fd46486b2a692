"""Training-free rivals as drafters, to replay recorded answers and to decode next to ours.

hf-specdec bench --replay answers.jsonl
hf-specdec bench --row hf_specdec.tools.bench.rivals:Racer --row auto:num_nodes=64

Written anew from their descriptions, with simpler and slower data structures. Know nothing about models.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import Array

Place = tuple[Sequence[int], int]  # a text, and a token in it

LONGEST_MATCH = 64  # of SuffixDecoding
DEPTH, WIDTH, MIN_MATCH = 10, 8, 2  # of RACER: order of its automaton, logits kept of a token, shortest match


class SuffixTexts:
    """Texts, and where each token stands in them."""

    def __init__(self) -> None:
        self.places: defaultdict[int, list[Place]] = defaultdict(list)

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """Add `tokens` to a text of these."""
        for token in tokens:
            text.append(token)
            self.places[token].append((text, len(text)))

    def matches(self, context: Sequence[int], longest: int) -> Iterator[tuple[int, list[Place]]]:
        """The tokens after each place where the last 1, 2, ... tokens of `context` stand, while there is one."""
        places = [place for place in self.places.get(context[-1], []) if place[1] < len(place[0])]
        for size in range(1, min(longest, len(context)) + 1):
            places = [(text, at) for text, at in places if at >= size and text[at - size] == context[-size]]
            if not places:
                return
            yield size, places


class SuffixDecoding(BaseDrafter):
    """Drafts what followed the end of the text, here and in earlier answers, by how often it did.

    Source: https://arxiv.org/abs/2411.04975, with the rule of Arctic Inference: of all matches of 1 to 64 tokens
    the tree with the largest sum of probabilities. Its limits by the match's length and by probability are left out:
    at equal numbers of tokens it drafts better without.

    Args:
        answers (*optional*): earlier answers, which this one joins.
    """

    def __init__(self, answers: SuffixTexts | None = None) -> None:
        self.answers = SuffixTexts() if answers is None else answers

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See `BaseDrafter.begin`."""
        self.own, self.text, self.prompt_length = SuffixTexts(), list[int](), len(prompt_ids)
        self.own.extend(self.text, prompt_ids)

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """See `BaseDrafter.draft_for`."""
        best = 0.0, DraftTree.chain(self.text[-1])
        for texts in (self.own, self.answers):
            for _, places in texts.matches(self.text, LONGEST_MATCH):
                best = max(best, self._grown(places, request.budget), key=lambda found: found[0])
        return best[1]

    def learn_from(self, result: DraftResult) -> None:
        """See `BaseDrafter.learn_from`."""
        self.own.extend(self.text, result.accepted)

    def end(self) -> None:
        """See `BaseDrafter.end`."""
        self.answers.extend([], self.text[self.prompt_length :])

    def _grown(self, places: list[Place], budget: int) -> tuple[float, DraftTree]:
        """Sum of its probabilities, and the tree of the likeliest nodes after these places."""
        builder, score = TreeBuilder(self.text[-1]), 0.0
        order = count()
        waiting = [(-1.0, next(order), -1, self.text[-1], places)]  # -probability, order, parent, token, places
        while waiting and len(builder) <= budget:
            negative, _, parent, token, here = heapq.heappop(waiting)
            node = 0 if parent < 0 else builder.add(parent, token)
            score -= negative if node else 0.0
            following: defaultdict[int, list[Place]] = defaultdict(list)
            for text, at in here:
                if at < len(text):
                    following[text[at]].append((text, at + 1))
            for child, reached in following.items():
                heapq.heappush(waiting, (negative * len(reached) / len(here), next(order), node, child, reached))
        return score, builder.build()


class Racer(BaseDrafter):
    """N-grams of this text by their counts, and the target's last logits of each token in what is left of the budget.

    Source: https://arxiv.org/abs/2604.14885. Its automaton forgets n-grams beyond 10,000 nodes; this one forgets none.
    """

    needs_logits = True
    num_top_logits = WIDTH
    num_prompt_logits = 4_096

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See `BaseDrafter.begin`."""
        self.texts, self.text, self.likely = SuffixTexts(), list[int](), dict[int, list[int]]()
        self.texts.extend(self.text, prompt_ids)

    def learn_prompt(self, tokens: Array, log_probs: Array) -> None:
        """See `BaseDrafter.learn_prompt`."""
        self.likely.update(zip(self.text[-1 - len(tokens) : -1], tokens.tolist(), strict=True))

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """See `BaseDrafter.draft_for`."""
        counts: Counter[tuple[int, tuple[int, ...]]] = Counter()  # of a match's size and what follows it
        for size, places in self.texts.matches(self.text, DEPTH - 1):
            for text, at in places if size >= MIN_MATCH else ():
                for end in range(at, min(at + DEPTH - size, len(text)) + 1):
                    counts[size, tuple(text[at:end])] += 1
        chosen = sorted(counts, key=lambda one: (-counts[one], one[0] + len(one[1])))[: request.budget]
        builder = TreeBuilder(self.text[-1])
        for _, path in chosen:
            builder.add_path(0, path)
        self._add_likely(builder, request.budget - len(chosen))
        return builder.build()

    def learn_from(self, result: DraftResult) -> None:
        """See `BaseDrafter.learn_from`."""
        if result.logits is not None:
            likely, _ = result.logits.top(WIDTH, slice(0, len(result.tree)))
            self.likely.update(zip(result.tree.tokens, likely.tolist(), strict=True))
        self.texts.extend(self.text, result.accepted)

    def _add_likely(self, builder: TreeBuilder, budget: int) -> None:
        """Add a tree of the last logits, level by level; each later sibling has half the children of the one before."""
        waiting = deque([(0, self.text[-1], WIDTH, 0)])  # node, token, children, depth
        while waiting and budget > 0:
            node, token, breadth, depth = waiting.popleft()
            below = breadth if depth == 1 else breadth // 2
            for child in self.likely.get(token, [])[: min(breadth, budget)]:
                waiting.append((builder.add(node, child), child, max(1, below), depth + 1))
                below //= 2
                budget -= 1
