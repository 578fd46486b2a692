"""The search in Python: what the compiled core computes, sum for sum, for tests to compare.

Written to be read, not to be fast. A *match* is a place in a text and how many tokens in front of it agree with the
context, all but one: a copy goes on behind a token that differs. When the context grows by a token, the matches that
this token follows move on by one; where few are left, the token's newest places join them. Candidates get the log odds
of every source that knows them. Their weighted sum is the score, the softmax of all scores, and of 0 for every other
token, the probability: multinomial logistic regression, which for two outcomes is the logistic mixing of PAQ
(http://mattmahoney.net/dc/dce.html#Section_432). Each token of the text moves the weights down the gradient of the log
loss, and corrects by what was accepted.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from hf_specdec.common.stats import SourceVote
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.methods.auto.recycled_logits import FLOOR, MAX_KEY, Entry
from hf_specdec.methods.auto.search import (
    COMMON,
    DRAFT,
    POOLED,
    RECYCLED,
    SIBLINGS,
    THIS_TEXT,
    Likeliest,
    Said,
    Sources,
)
from hf_specdec.methods.auto.spec_memory import (
    MOST,
)
from hf_specdec.methods.common.ngrams import NgramIndex, NgramPool
from hf_specdec.methods.common.node_logits import Array
from tests.native.mixing import (
    Noise,
    corrected,
    kind_of,
    learn_outcomes,
    learn_weights,
    softmax,
    sum_of,
    weighted_sums,
    weights_of,
)
from tests.native.recycled import get, keys_of, longest

__all__ = ["PythonSearch"]
NUM_COMMON = 16  # commonest tokens looked at
NUM_PLACES = 16  # newest occurrences of an n-gram looked at
MAX_MATCH = 16  # tokens in front of a place compared
COUNTED_MATCH = 8  # length as which the longest match counts at most, shorter ones less in proportion
FEW = 4  # matches below which a context is looked up anew
SMOOTHING_COUNT = 4.0  # votes for tokens never seen after the context
OTHERS_NOISE, OTHERS_DRAFTED = 0.5, 2.0  # of all other tokens; where a draft named those of little noise. Measured
LEAST_NOISE = 1e-30
NEVER_DRAWN = -1e4  # score of a token that no draw can choose
FADE = 0.97  # of what was accepted and expected in this text, a token
Match = tuple[Sequence[int], int, int]  # text, place in it, matching tokens in front of the place, at most MAX_MATCH


class Prediction(NamedTuple):
    """Candidates for the token after a node, with their probabilities before and after the correction."""

    tokens: list[int]
    raw: list[float]
    probabilities: list[float]
    kind: int
    said: Said
    weights: Sequence[float]
    noise: Noise | None

    def share(self, token: int) -> float:
        """Probability of `token`, 0 where it is no candidate."""
        return self.probabilities[self.tokens.index(token)] if token in self.tokens else 0.0


class _Node:
    """A drafted token, the root among them, with what is known of it."""

    def __init__(self, number: int, token: int, parent: "_Node | None" = None) -> None:
        self.number, self.token, self.parent = number, token, parent
        self.path: tuple[int, ...] = () if parent is None else (*parent.path, token)
        self.probability = 1.0
        self.children: dict[int, _Node] = {}
        self.matches: tuple[list[Match], list[Match]] | None = None
        self.drafted: Entry | None = None  # the draft model's
        self.prediction: Prediction | None = None


class PythonSearch:
    """The search of one step. Arguments and methods are those of `Search`."""

    def __init__(
        self,
        sources: Sources,
        index: NgramIndex,
        *,
        takes_trees: bool = True,
        max_depth: int = ANY_DEPTH,
        noise: Sequence[Array] = (),
    ) -> None:
        self._sources, self._learned, self._index, self._noise = sources, sources.learned, index, noise
        self._takes_trees, self._max_depth, self._end = takes_trees, max_depth, len(index)
        self._nodes, self._common = [_Node(0, index.tokens[-1])], _common_of(index)

    def likeliest(self, budget: int, floor: float) -> Likeliest:
        """See `Search`."""
        waiting: list[tuple[float, int, _Node, int]] = []  # (-probability, order of arrival, parent, token)
        best: list[float] = []  # probabilities of the `budget` likeliest candidates so far, a heap: the least is first
        result, places, arrivals = [self._nodes[0]], {0: 0}, 0
        while len(result) <= budget:
            for token, probability in self._candidates(result[-1], floor):
                if len(best) < budget:
                    heapq.heappush(best, probability)
                elif probability > best[0]:
                    heapq.heapreplace(best, probability)
                else:
                    continue  # so many others exceed it already
                arrivals += 1
                heapq.heappush(waiting, (-probability, arrivals, result[-1], token))
            if len(best) == budget and best[0] > floor:
                floor = best[0]
            if not waiting:
                break
            negative, _, parent, token = heapq.heappop(waiting)
            if token not in parent.children:
                parent.children[token] = _Node(len(self._nodes), token, parent)
                self._nodes.append(parent.children[token])
            child = parent.children[token]
            child.probability, places[child.number] = -negative, len(result)
            result.append(child)
        return Likeliest(
            [node.number for node in result],
            tuple([node.token for node in result]),
            tuple([-1 if node.parent is None else places[node.parent.number] for node in result]),
            tuple([node.probability for node in result]),
            tuple([len(node.path) for node in result]),
        )

    def token(self, node: int) -> int:
        """See `Search`."""
        return self._nodes[node].token

    def parent(self, node: int) -> int:
        """See `Search`."""
        parent = self._nodes[node].parent
        return -1 if parent is None else parent.number

    def child(self, node: int, token: int) -> int:
        """See `Search`."""
        child = self._nodes[node].children.get(token)
        return -1 if child is None else child.number

    def probability(self, node: int) -> float:
        """See `Search`."""
        return self._nodes[node].probability

    def votes(self, node: int, token: int) -> tuple[SourceVote, ...]:
        """See `Search`."""
        prediction = self.predicted(self._nodes[node])
        return self._sources.votes(token, prediction.said, prediction.weights)

    def score(self, node: int, entry: Entry) -> None:
        """See `Search`."""
        self._nodes[node].drafted, self._nodes[node].prediction = entry, None

    def value(self, nodes: Sequence[int]) -> float:
        """See `Search`."""
        probabilities, total = {0: 1.0}, 0.0
        for number in nodes[1:]:
            node = self._nodes[number]
            assert node.parent is not None
            share = self.predicted(node.parent).share(node.token)
            probabilities[number] = probabilities[node.parent.number] * share
            total += probabilities[number]
        return total

    def follow(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """See `Search`."""
        here, place = self._nodes[0], 0
        for token in accepted:
            prediction = self.predicted(here)
            drafted = [tree.tokens[child] for child in tree.children(place)] if place >= 0 else []
            self._learn(prediction, token, [item for item in drafted if item in prediction.tokens])
            following = tree.child(place, token) if place >= 0 else None
            if token not in here.children:
                break
            here, place = here.children[token], -1 if following is None else following

    def predicted(self, node: _Node) -> Prediction:
        """Candidates after `node`, computed at first use."""
        if node.prediction is None:
            node.prediction = self._predict(node)
        return node.prediction

    def _candidates(self, node: _Node, floor: float) -> list[tuple[int, float]]:
        """Tokens after `node` that are as likely as `floor` together with all before them."""
        reached = node.probability
        if reached * MOST < floor or len(node.path) >= self._max_depth:
            return []
        prediction = self.predicted(node)
        both = zip(prediction.tokens, prediction.probabilities, strict=True)
        result = [(token, reached * share) for token, share in both if reached * share >= floor]
        return result if self._takes_trees else sorted(result, key=lambda item: -item[1])[:1]

    def _predict(self, node: _Node) -> Prediction:
        kind, said = self._said_of(node)
        bias, *weights = weights_of(self._learned, kind)
        sums, noise = weighted_sums(said, bias, weights), None
        if len(node.path) < len(self._noise):
            others = OTHERS_NOISE if node.drafted is None else OTHERS_DRAFTED
            noise = [_score_of(self._noise[len(node.path)], token) for token in sums], -math.log(others)
        raw, trust = softmax(sums.values(), noise), self._sources.trust
        probabilities = [min(MOST, corrected(self._learned, probability) * trust) for probability in raw]
        total = max(sum_of(probabilities), 1.0)
        probabilities = [probability / total for probability in probabilities]
        return Prediction(list(sums), raw, probabilities, kind, said, weights, noise)

    def _learn(self, prediction: Prediction, token: int, drafted: Sequence[int]) -> None:
        """Learn that `token` came; `drafted` are the candidates that were verified."""
        learn_weights(self._learned, prediction.kind, prediction.said, token, prediction.noise)
        if drafted:
            raw = [prediction.raw[prediction.tokens.index(item)] for item in drafted]
            record = self._sources.record
            record[0] = FADE * record[0] + sum_of([corrected(self._learned, probability) for probability in raw])
            record[1] = FADE * record[1] + (token in drafted)
            learn_outcomes(self._learned, zip(raw, [item == token for item in drafted], strict=True))

    def _said_of(self, node: _Node) -> tuple[int, Said]:
        """Kind of the context that ends with `node`, and what each source that knows it says."""
        sources, (ours, pooled) = self._sources, self._matches_of(node)
        tail = (*self._index.tokens[-MAX_KEY - 1 :], *node.path)
        keys, above = keys_of(tail[-MAX_KEY:]), keys_of(tail[-MAX_KEY - 1 : -1])
        votes = [(place, self._counted(node, result)) for place, result in ((THIS_TEXT, ours), (POOLED, pooled))]
        said, level = [(place, entry) for place, entry in votes if entry[0]], 0
        for size, key in enumerate(keys, 1):
            if sources.recycled is not None and (entry := get(sources.recycled, key)) is not None:
                said, level = [*said, (RECYCLED + MAX_KEY - size, entry)], size
        if not level:
            said.append((COMMON, self._common))
        if node.drafted is not None:
            said.append((DRAFT, node.drafted))
        if sources.recycled is not None and (entry := longest(sources.recycled, above)) is not None:
            others = [pair for pair in zip(*entry, strict=True) if pair[0] != node.token]
            said.append((SIBLINGS, ([token for token, _ in others], [value for _, value in others])))
        return kind_of(max([size for *_, size in ours], default=0), level, node.drafted is not None), said

    def _matches_of(self, node: _Node) -> tuple[list[Match], list[Match]]:
        """Matches of the context that ends with `node`, in this text and in earlier ones."""
        if node.matches is not None:
            return node.matches
        index, pool, parent = self._index, self._sources.pool, node.parent
        if parent is None:
            node.matches = found_in(index, index), [] if pool is None else found_in(pool, index)
            return node.matches
        ours, pooled = (
            [
                (text, place + 1, min(size + 1, MAX_MATCH))
                for text, place, size in matches
                if self._follower(parent, text, place) == node.token
            ]
            for matches in self._matches_of(parent)
        )
        if len(ours) < FEW:
            seen = [place for _, place, _ in ours]
            ours += [(index.tokens, new, 1) for new in index.places((node.token,), NUM_PLACES) if new not in seen]
        node.matches = ours, pooled
        return node.matches

    def _follower(self, node: _Node, text: Sequence[int], place: int) -> int:
        """Token at a place; after the text's end come the drafted ones. Below 0 at the end of an earlier text."""
        if text is self._index.tokens and place >= self._end:
            return node.path[place - self._end]
        return text[place] if place < len(text) else -1

    def _counted(self, node: _Node, matches: Sequence[Match]) -> Entry:
        """Votes as evidence: a match of m tokens has m * m."""
        votes, longest = dict[int, float](), max([COUNTED_MATCH, *[size for *_, size in matches]])
        for text, place, size in matches:
            if (token := self._follower(node, text, place)) >= 0:
                votes[token] = votes.get(token, 0.0) + size * size
        total = sum(votes.values()) + SMOOTHING_COUNT * (longest / COUNTED_MATCH) ** 2
        return list(votes), [max(0.0, FLOOR + math.log(count / (total - count))) for count in votes.values()]


def found_in(source: NgramIndex | NgramPool, index: NgramIndex) -> list[Match]:
    """Find the newest places in `source` after every n-gram that ends the text of `index`, each once."""
    context, result = index.tokens[-MAX_MATCH:], dict[tuple[int, int], Match]()
    for size in range(min(source.max_ngram_size, len(context)), 0, -1):
        if isinstance(source, NgramIndex):
            places = [(source, place) for place in source.places(context[-size:], NUM_PLACES)]
        else:
            places = source.search(context[-size:], limit=NUM_PLACES)
        for other, place in places:
            result.setdefault((id(other), place), (other.tokens, place, match_length(other.tokens, place, context)))
    return list(result.values())


def match_length(text: Sequence[int], place: int, context: Sequence[int]) -> int:
    """Count the tokens in front of `place` that agree with the end of `context`, up to the second that does not."""
    same = 0
    for back in range(1, min(place, len(context)) + 1):
        if back > same + 2:
            break
        same += text[place - back] == context[-back]
    return same


def _score_of(noise: Array, token: int) -> float:
    """Part of a token's score by the noise of its draw."""
    return -math.log(max(float(noise[token]), LEAST_NOISE)) if token < len(noise) else NEVER_DRAWN


def _common_of(index: NgramIndex) -> Entry:
    """The text's commonest tokens and the evidence for each: the last resort after unknown contexts."""
    ranking, ranked, total = index.common.arrays
    shares = [(token, count / total) for token, count in zip(ranking, ranked, strict=True)][:NUM_COMMON]
    return [token for token, _ in shares], [max(0.0, FLOOR + math.log(share / (1.0 - share))) for _, share in shares]
