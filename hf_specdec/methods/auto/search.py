"""The tree of one step: nodes that the target most likely accepts, found best first, and what is learned from them.

Nodes are numbered as they are first drafted; the root is 0. `Search` is the literal form in Python. `CompiledSearch`
finds the same nodes with the same probabilities in the compiled core. Knows neither clocks nor models.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_specdec.common.observer import SourceVote
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.kernels import native
from hf_specdec.methods.auto.calibration import MOST
from hf_specdec.methods.auto.predictor import Context, NoiseRow, Prediction, Predictor
from hf_specdec.methods.auto.recycled_logits import Entry
from hf_specdec.methods.common.ngram.index import NgramIndex


class Found(NamedTuple):
    """The likeliest nodes in the order of their probabilities, the root first, each after its parent.

    Attributes:
        nodes (`list[int]`): their numbers in the search.
        tokens (`tuple[int, ...]`): token of each.
        parents (`tuple[int, ...]`): the place of each one's parent in these lists; -1 for the root.
        probabilities (`tuple[float, ...]`): that the target accepts it and all before it.
        depths (`tuple[int, ...]`): distance of each from the root.
        children (`tuple[dict[int, int], ...]`): of each, the places of the nodes below it by their tokens.
    """

    nodes: list[int]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    depths: tuple[int, ...]
    children: tuple[dict[int, int], ...]


class _Node:
    """A drafted token, the root among them.

    Attributes:
        probability: that the target accepts it and all before it.
        prediction: candidates after it, once it has been looked at.
        drafted: the draft model's entry for it, if that was asked.
        depth: distance from the root.
    """

    __slots__ = ("_context", "children", "depth", "drafted", "number", "parent", "prediction", "probability", "token")

    def __init__(self, number: int, token: int, parent: "_Node | None", context: Context | None = None) -> None:
        self.number, self.token, self.parent, self._context = number, token, parent, context
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.probability = 1.0
        self.prediction: Prediction | None = None
        self.drafted: Entry | None = None
        self.children: dict[int, _Node] = {}

    @property
    def context(self) -> Context:
        """Where its prediction is asked for; found out at first use, as many nodes are never looked at."""
        if self._context is None:
            assert self.parent is not None
            self._context = self.parent.context.after(self.token)
        return self._context


def search_of(
    predictor: Predictor,
    index: NgramIndex,
    *,
    takes_trees: bool = True,
    max_depth: int = ANY_DEPTH,
    noise: Sequence[NoiseRow] = (),
) -> "Search | CompiledSearch":
    """The search of one step, compiled where the core is there; see `Search` for the arguments."""
    kind = Search if native.core is None else CompiledSearch
    return kind(predictor, index, takes_trees, max_depth, noise)


class Search:
    """The search of one step.

    Args:
        predictor: knows what follows a context.
        index: the text; its last token is the root.
        takes_trees: whether siblings are verified; where not, a chain is grown.
        max_depth: nodes one under the other, the root apart, at most.
        noise: of the draws after the nodes of depth 0, 1, ... as far as it is known; see `common/draw_noise.py`.
    """

    def __init__(
        self, predictor: Predictor, index: NgramIndex, takes_trees: bool, max_depth: int, noise: Sequence[NoiseRow]
    ) -> None:
        self._predictor, self._takes_trees, self._max_depth, self._noise = predictor, takes_trees, max_depth, noise
        self._nodes = [_Node(0, index.tokens[-1], None, predictor.text_of(index))]

    def likeliest(self, budget: int, floor: float) -> Found:
        """At most `budget` nodes below the root, none of a probability below `floor`.

        Candidates that so many others exceed already are not kept, and not looked for.
        """
        waiting: list[tuple[float, int, _Node, int]] = []  # (-probability, order of arrival, parent, token)
        best: list[float] = []  # probabilities of the `budget` likeliest candidates so far, a heap: the least is first
        found, places, arrivals = [self._nodes[0]], {0: 0}, 0
        while len(found) <= budget:
            node = found[-1]
            for token, probability in self._candidates(node, floor):
                if len(best) < budget:
                    heapq.heappush(best, probability)
                elif probability > best[0]:
                    heapq.heapreplace(best, probability)
                else:
                    continue
                arrivals += 1
                heapq.heappush(waiting, (-probability, arrivals, node, token))
            if len(best) == budget and best[0] > floor:
                floor = best[0]
            if not waiting:
                break
            negative, _, parent, token = heapq.heappop(waiting)
            child = self._child(parent, token)
            child.probability = -negative
            places[child.number] = len(found)
            found.append(child)
        return _found(found, places)

    def token(self, node: int) -> int:
        """The token that `node` holds."""
        return self._nodes[node].token

    def parent(self, node: int) -> int:
        """The node above `node`; -1 for the root."""
        parent = self._nodes[node].parent
        return -1 if parent is None else parent.number

    def child(self, node: int, token: int) -> int:
        """The node below `node` that holds `token`; -1 where none was drafted."""
        child = self._nodes[node].children.get(token)
        return -1 if child is None else child.number

    def probability(self, node: int) -> float:
        """That the target accepts `node` and all before it, as last drafted."""
        return self._nodes[node].probability

    def votes(self, node: int, token: int) -> tuple[SourceVote, ...]:
        """What each source that knows `token` said of it after `node`, the one that added most first."""
        prediction = self._predicted(self._nodes[node])
        return self._predictor.votes(token, prediction.sources, prediction.weights)

    def score(self, node: int, entry: Entry) -> None:
        """The draft model says `entry` of `node`."""
        self._nodes[node].drafted, self._nodes[node].prediction = entry, None

    def value(self, nodes: Sequence[int]) -> float:
        """Expected accepted tokens of these nodes, the root first and left out, by what is known now."""
        probabilities, total = {0: 1.0}, 0.0
        for number in nodes[1:]:
            node = self._nodes[number]
            assert node.parent is not None
            share = self._predicted(node.parent).share(node.token)
            probabilities[number] = probabilities[node.parent.number] * share
            total += probabilities[number]
        return total

    def follow(self, tree: DraftTree, accepted: Sequence[int], floor: float) -> int:
        """Learn every token that the text went on with, down the verified `tree`.

        Returns:
            `int`: how many of them were drafted and would have been less likely than `floor` without a window; not
            asked where `floor` is 0.
        """
        here, place, without, gained = self._nodes[0], 0, 1.0, 0
        for token in accepted:
            prediction = self._predicted(here)
            drafted = [tree.tokens[child] for child in tree.children(place)] if place >= 0 else []
            self._predictor.learn(prediction, token, [one for one in drafted if one in prediction.tokens])
            following = tree.child(place, token) if place >= 0 else None
            if following is not None and floor > 0.0:
                if prediction.is_found:
                    prediction = self._predict(here, uses_found=False)
                without *= prediction.share(token)
                gained += without < floor
            if token not in here.children:
                break
            here, place = here.children[token], -1 if following is None else following
        return gained

    def _candidates(self, node: _Node, floor: float) -> list[tuple[int, float]]:
        """Tokens after `node` that are as likely as `floor` together with all before them."""
        reached = node.probability
        if reached * MOST < floor or node.depth >= self._max_depth:
            return []
        prediction = self._predicted(node)
        both = zip(prediction.tokens, prediction.probabilities, strict=True)
        found = [(token, reached * share) for token, share in both if reached * share >= floor]
        return found if self._takes_trees else sorted(found, key=lambda one: -one[1])[:1]

    def _predicted(self, node: _Node) -> Prediction:
        if node.prediction is None:
            node.prediction = self._predict(node)
        return node.prediction

    def _predict(self, node: _Node, *, uses_found: bool = True) -> Prediction:
        noise = self._noise[node.depth] if node.depth < len(self._noise) else None
        return self._predictor.predict(node.context, node.drafted, noise, uses_found=uses_found)

    def _child(self, parent: _Node, token: int) -> _Node:
        """The node below that holds `token`, made at first use."""
        known = parent.children.get(token)
        if known is None:
            known = parent.children[token] = _Node(len(self._nodes), token, parent)
            self._nodes.append(known)
        return known


def _found(nodes: Sequence[_Node], places: Mapping[int, int]) -> Found:
    """What is told of these nodes, the root first; `places` are theirs by their numbers."""
    parents = [-1 if node.parent is None else places[node.parent.number] for node in nodes]
    depths, children = [0] * len(nodes), [dict[int, int]() for _ in nodes]
    for place, parent in enumerate(parents[1:], 1):
        depths[place] = depths[parent] + 1
        children[parent][nodes[place].token] = place
    return Found(
        [node.number for node in nodes],
        tuple([node.token for node in nodes]),
        tuple(parents),
        tuple([node.probability for node in nodes]),
        tuple(depths),
        tuple(children),
    )


class CompiledSearch:
    """The same search in the compiled core. Arguments and methods are those of `Search`."""

    def __init__(
        self, predictor: Predictor, index: NgramIndex, takes_trees: bool, max_depth: int, noise: Sequence[NoiseRow]
    ) -> None:
        assert native.core is not None
        self._predictor = predictor
        young, old, recycled, found, learned = predictor.arrays
        self._search = native.core.Search(
            index.arrays,
            young,
            old,
            recycled,
            found,
            learned,
            index.common.arrays,
            takes_trees,
            max_depth,
            tuple(noise),
        )
        self.token, self.parent = self._search.token, self._search.parent
        self.child, self.probability = self._search.child, self._search.probability
        self.value = self._search.value

    def likeliest(self, budget: int, floor: float) -> Found:
        """See `Search.likeliest`."""
        return Found(*self._search.likeliest(budget, floor))

    def votes(self, node: int, token: int) -> tuple[SourceVote, ...]:
        """See `Search.votes`."""
        said, weights = self._search.said(node)
        return self._predictor.votes(token, [(place, (tokens, evidence)) for place, tokens, evidence in said], weights)

    def follow(self, tree: DraftTree, accepted: Sequence[int], floor: float) -> int:
        """See `Search.follow`."""
        return self._search.follow(tree.tokens, tree.parents, accepted, floor)

    def score(self, node: int, entry: Entry) -> None:
        """See `Search.score`."""
        self._search.score(node, list(entry[0]), list(entry[1]))
