"""Auto: one predictor over all training-free sources, and a draft model where one is given.

The tree grows best first, by the probability that the target accepts a node and all before it. How many nodes pay is
not decided here: nodes come in the order of their worth, with their probabilities, and whoever verifies them cuts.
A draft model is asked where the nodes that it adds are worth its forward, judged by what its forwards added before; so
is lookahead's window added, where it is worth its columns.
Knows neither clocks nor models.

    drafter = AutoDrafter(AutoSpecConfig(), SpecMemory())
"""

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from hf_specdec.methods.auto.calibration import MOST
from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.auto.predictor import Context, Prediction, Predictor
from hf_specdec.methods.auto.recycled_logits import MAX_KEY, NUM_KEPT, TOKEN_BITS, Entry, best_tokens, likeliest
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.auto.window import AutoWindow
from hf_specdec.methods.draft_scorer import DraftRound, DraftScorer, RoundDrafter
from hf_specdec.methods.ngram.index import NgramIndex
from hf_specdec.methods.node_logits import NodeLogits
from hf_specdec.observer import DraftedNode
from hf_specdec.tree import DraftTree, TreeBuilder

__all__ = ["AutoDrafter"]

MAX_NGRAM = 4
SMALLEST = 1e-3  # nodes below this probability are never worth a look
WIDTH = 10  # nodes scored by one forward of the draft model, at most
RETRY = 16  # where asking the draft model does not pay, ask every so many steps all the same, to notice a change


class _Node:
    """A drafted token while the tree grows, the root among them.

    Attributes:
        probability: that the target accepts it and all before it.
        prediction: candidates after it, once it has been looked at.
        drafted: the draft model's entry for it, if that was asked.
        scored_as: its node in the requests to the draft model.
    """

    __slots__ = ("_context", "children", "drafted", "parent", "prediction", "probability", "scored_as", "token")

    def __init__(self, token: int, parent: "_Node | None" = None, context: Context | None = None) -> None:
        self.token, self.parent, self._context = token, parent, context
        self.probability = 1.0
        self.prediction: Prediction | None = None
        self.drafted: Entry | None = None
        self.scored_as: int | None = None
        self.children: dict[int, _Node] = {}

    @property
    def context(self) -> Context:
        """Where its prediction is asked for; found out at first use, as many nodes are never looked at."""
        if self._context is None:
            assert self.parent is not None
            self._context = self.parent.context.after(self.token)
        return self._context

    def child(self, token: int) -> "_Node":
        """The node below that holds `token`, made at first use."""
        known = self.children.get(token)
        if known is None:
            known = self.children[token] = _Node(token, self)
        return known


class AutoDrafter(RoundDrafter):
    """Drafts with everything at hand.

    Args:
        config: see `AutoSpecConfig`.
        memory: what is remembered; `None` is a memory of this text alone.
        scorer: the draft model with this row's text, if there is one.
        is_sampled: whether tokens are drawn.
        takes_trees: whether the target verifies siblings; where not, a chain is grown.
    """

    num_top_logits = NUM_KEPT
    index: NgramIndex
    window: AutoWindow | None
    _root: _Node | None
    _described: _Node | None  # the root of the last round, for observers

    def __init__(
        self,
        config: AutoSpecConfig,
        memory: SpecMemory | None = None,
        *,
        scorer: DraftScorer | None = None,
        is_sampled: bool = False,
        takes_trees: bool = True,
    ) -> None:
        super().__init__(scorer)
        self.config, self.takes_trees, self.is_sampled = config, takes_trees, is_sampled
        self.remembers = memory is not None
        self.window: AutoWindow | None = None
        self._root: _Node | None = None
        self._described: _Node | None = None  # the root of the last round, for observers
        self.index = NgramIndex(MAX_NGRAM)
        self._start(SpecMemory(1, config.max_recycled) if memory is None else memory)

    @property
    def is_paused(self) -> bool:
        """Whether no draft can gain its time now: then nothing is looked up and no logits are read."""
        return self.draft_cost.of_node >= 1.0

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        """Whether the next step's logits are kept."""
        return self.config.use_recycled and not self.is_paused

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt."""
        self._start(self.memory if self.remembers else SpecMemory(1, self.config.max_recycled))
        self.index.extend(prompt_ids)
        if self.scorer is not None:
            self.scorer.begin(prompt_ids)

    def grow(self, budget: int) -> DraftRound:
        """The tree of the likeliest nodes, at most `budget`; asks the draft model as often as that pays."""
        budget = min(budget, self.config.node_budget)
        if budget < 1 or self.is_paused:
            self._root = None
            return DraftTree.chain(self.index.tokens[-1])
        root = self._root = self._described = _Node(self.index.tokens[-1], context=self.predictor.text_of(self.index))
        nodes = self._likeliest(root, budget)
        if self.scorer is None:
            return self._tree_of(root, nodes)
        scored = TreeBuilder(root.token)
        for number in range(self.config.draft_len):
            wanted = self._worth_scoring(root, nodes)
            if not wanted or not self._pays(number):
                break
            for node in wanted:
                node.scored_as = 0 if node.parent is None else scored.add(_scored(node.parent), node.token)
            rows = yield scored.build()
            for node, entry in zip(wanted, best_tokens(NodeLogits(rows)), strict=True):
                node.drafted, node.prediction = entry, None
            before, nodes = nodes, self._likeliest(root, budget)
            self.predictor.experience.gained(number, self._value(nodes) - self._value(before))
        return self._tree_of(root, nodes)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Learn what the sources were worth, keep the logits, index the new tokens."""
        self._learn(tree, accepted)
        read = self.take_logits(logits)
        if read is not None:
            self._recycle(tree, read)
            if self.window is not None:
                self.window.observe(tree, read)
        self.index.extend(accepted)
        if self.scorer is not None:
            self.scorer.keep(tree, accepted)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """The source that made each node likeliest, and what each source said of it."""
        assert self._described is not None or len(tree) == 1
        grown, described = [self._described], []
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            above = grown[parent]
            assert above is not None and above.prediction is not None
            node, votes = above.children[token], above.prediction.votes(token)
            grown.append(node)
            described.append(DraftedNode(votes[0].source, node.probability, votes))
        return tuple(described)

    def end(self) -> None:
        """Hand the text to the memory; a second call adds nothing."""
        if self.remembers and len(self.index):
            self.memory.pool.add(self.index.tokens)
            self.index = NgramIndex(MAX_NGRAM)

    def _start(self, memory: SpecMemory) -> None:
        """An empty text beside what `memory` knows."""
        config, self.memory = self.config, memory
        self.predictor = Predictor(
            memory, is_sampled=self.is_sampled, uses_texts=self.remembers, uses_recycled=config.use_recycled
        )
        self.index = NgramIndex(MAX_NGRAM)
        self.window = None
        if config.window_size and config.num_nodes is None and config.use_recycled and self.takes_trees:
            self.window = AutoWindow(config.window_size, config.ngram_size, self.predictor.experience)
            self.predictor.found = self.window.found
            self.max_extra_tokens = self.window.num_columns
        self._root = self._described = None
        self._skipped = 0

    def _likeliest(self, root: _Node, budget: int) -> list[_Node]:
        """At most `budget` nodes in the order of their probabilities, each after its parent.

        Candidates that so many others exceed already are not kept, and not looked for.
        """
        floor = max(SMALLEST, self.draft_cost.of_node)
        nodes: list[_Node] = []
        waiting: list[tuple[float, int, _Node, int]] = []  # (-probability, order of arrival, parent, token)
        best: list[float] = []  # probabilities of the `budget` likeliest candidates so far, a heap: the least is first
        arrivals = 0
        node = root
        while True:
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
            if not waiting or len(nodes) == budget:
                return nodes
            negative, _, parent, token = heapq.heappop(waiting)
            node = parent.child(token)
            node.probability = -negative
            nodes.append(node)

    def _candidates(self, node: _Node, floor: float) -> list[tuple[int, float]]:
        """Tokens after `node` that are as likely as `floor` together with all before them."""
        reached = node.probability
        if reached * MOST < floor:
            return []
        if node.prediction is None:
            node.prediction = self.predictor.predict(node.context, node.drafted)
        tokens, shares = node.prediction.tokens, node.prediction.probabilities
        found = [
            (token, reached * share) for token, share in zip(tokens, shares, strict=True) if reached * share >= floor
        ]
        return found if self.takes_trees else sorted(found, key=lambda one: -one[1])[:1]

    def _tree_of(self, root: _Node, nodes: Sequence[_Node]) -> DraftTree:
        """The tree of these nodes, numbered in their order, with their probabilities; a window beside it."""
        builder = TreeBuilder(root.token)
        places = {id(root): 0}
        for node in nodes:
            places[id(node)] = builder.add(places[id(node.parent)], node.token)
        tree = builder.build().with_probabilities((1.0, *[node.probability for node in nodes]))
        if self.window is None:
            return tree
        return tree.with_extra(self.window.beside(self.index.tokens, self.draft_cost.of_node))

    def _value(self, nodes: Sequence[_Node]) -> float:
        """Expected accepted tokens of a tree by what is known now, less those that its forward has to gain."""
        probabilities: dict[int, float] = {}
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.prediction is None:
                parent.prediction = self.predictor.predict(parent.context, parent.drafted)
            probabilities[id(node)] = probabilities.get(id(parent), 1.0) * parent.prediction.share(node.token)
        return sum(probabilities.values()) - len(nodes) * self.draft_cost.of_node

    def _worth_scoring(self, root: _Node, nodes: Sequence[_Node]) -> list[_Node]:
        """The likeliest nodes that the draft model has not been asked for and can be."""
        known = [node for node in (root, *nodes) if node.drafted is None]
        wanted = [node for node in known if node.parent is None or node.parent.scored_as is not None]
        if self.scorer is not None and not self.scorer.takes_trees:
            last = root
            while last.drafted is not None and last.children:
                following = next((child for child in last.children.values() if child.drafted is not None), None)
                if following is None:
                    break
                last = following
            wanted = [node for node in wanted if node is root or node.parent is last][:1]
        return wanted[:WIDTH]

    def _pays(self, number: int) -> bool:
        """Whether the draft model's forward of this number is worth its time, by what such forwards added before."""
        assert self.scorer is not None
        if self.predictor.experience.gain(number) >= self.scorer.relative_cost * self.draft_cost.of_forward:
            return True
        self._skipped += 1
        return self._skipped % RETRY == 0

    def _learn(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Let the predictor see the token after every context that the text went through."""
        node, place = self._root, 0
        floor, without, gained = max(SMALLEST, self.draft_cost.of_node), 1.0, 0
        for token in accepted:
            if node is None:
                break
            if node.prediction is None:
                node.prediction = self.predictor.predict(node.context, node.drafted)
            known = node.prediction.tokens
            children = [] if place < 0 else [tree.tokens[child] for child in tree.children(place)]
            self.predictor.learn(node.prediction, token, [child for child in children if child in known])
            following = tree.child(place, token) if place >= 0 else None
            if following is not None and self.window is not None:
                without *= self._share_without_window(node.prediction, token)
                gained += without < floor
            node, place = node.children.get(token), -1 if following is None else following
        if tree.extra is not None:
            self.predictor.experience.window_gained(gained)
        self._root = None

    def _share_without_window(self, prediction: Prediction, token: int) -> float:
        """The probability that `token` would have had without what the window found."""
        if prediction.is_found:
            prediction = self.predictor.predict(prediction.context, prediction.drafted, uses_found=False)
        return prediction.share(token)

    def _recycle(self, tree: DraftTree, logits: NodeLogits) -> None:
        """Keep what the target thought after every node, those that were rejected too."""
        text, count = self.index.tokens, len(tree)
        keys = np.empty((MAX_KEY, count), dtype=np.int64)  # after one, two and three tokens
        last, parents = np.array(tree.tokens, dtype=np.int64) + 1, np.array(tree.parents)
        ends, keys[0] = last, last
        for size in range(1, MAX_KEY):
            before = ends[parents]  # the tokens `size` places earlier
            before[0] = text[-1 - size] + 1 if size < len(text) else 0
            keys[size] = keys[size - 1] | before << size * TOKEN_BITS
            ends = before
        tokens, evidence = likeliest(logits, slice(0, count))
        shape = (MAX_KEY * count, NUM_KEPT)
        rows = (np.broadcast_to(row, (MAX_KEY, count, NUM_KEPT)).reshape(shape) for row in (tokens, evidence))
        self.memory.recycled.put_rows(keys.reshape(-1), *rows)


def _scored(node: _Node) -> int:
    assert node.scored_as is not None
    return node.scored_as
