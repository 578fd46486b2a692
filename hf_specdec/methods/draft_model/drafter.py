"""Draft-model speculation: a smaller model drafts a chain or a tree, the target verifies it.

Each forward of the draft scores the most promising nodes at once; its best tokens after them join the tree. Another
forward is spent only where the tokens it may add are worth it, by counted acceptances and the two models' sizes.
Sources: https://arxiv.org/abs/2211.17192 (speculative decoding), https://arxiv.org/abs/2406.16858 (EAGLE-2: expand the
most probable nodes, then rerank), https://arxiv.org/abs/2406.17276 (OPT-Tree). Knows the draft as a `DraftScorer` only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.draft_scorer import DraftRound, DraftScorer, NoForward, RoundDrafter
from hf_specdec.methods.common.drafter import TOKEN_COST, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.common.sampling import LogitsProcessorFn, coupled, process_rows
from hf_specdec.methods.draft_model.candidates import (
    AcceptanceCounts,
    Candidate,
    GainCurve,
    Growth,
    depth_first,
    drawn_child,
    likeliest_children,
)
from hf_specdec.methods.draft_model.config import DraftModelConfig

WIDTH = 10  # nodes scored by one forward of the draft, at most
GROWTH = 2  # tokens that a branch may have more after one that was accepted as a whole
RETRY = 16  # where drafting saves no time, every so many steps draft all the same, to notice a change


class DraftModelDrafter(RoundDrafter):
    """Drafts with a model.

    Greedy decoding takes the draft's likeliest tokens, sampling those that the target's next draws most likely choose.
    With `use_logits` and a `logits_processor`, that is when sampling, a chain is drawn from the draft's distribution,
    and says from which.

    Args:
        config: see `DraftModelConfig`.
        scorer: the draft with this row's text.
        logits_processor: the draft's own logits processors, for n nodes of one depth: of a function that gives their
            texts, `(n, L)` ids, and of `(n, vocab_size)` logits.
        generator: for the draws; `None` is the global one.
        counts: acceptances counted in earlier calls. Not used where drafts are drawn: the text depends on them then, so
            that the same seed has to give the same drafts.
        token_cost: what a drafted token more a row adds to a forward of so many rows, over that of one token a row,
            where a row has so many drafted tokens.
    """

    def __init__(
        self,
        config: DraftModelConfig,
        scorer: DraftScorer,
        *,
        logits_processor: LogitsProcessorFn | None = None,
        generator: torch.Generator | None = None,
        counts: AcceptanceCounts | None = None,
        token_cost: Callable[[int, int], float] = lambda num_rows, num_nodes: TOKEN_COST,
    ) -> None:
        super().__init__(scorer)
        self.scorer: DraftScorer = scorer
        self.config, self.logits_processor, self.generator = config, logits_processor, generator
        self.token_cost = token_cost
        self.draws = config.use_logits and logits_processor is not None
        self.counts = counts if counts is not None and not self.draws else AcceptanceCounts()
        self._text: list[int] = []
        self._round: Growth | None = None
        self._described: Growth | None = None  # the last round, for observers
        self._gain = GainCurve(())  # of a scored node's children, in this round
        self._request = DraftRequest(0)  # of this round
        self._skipped = 0
        self._len = config.start_len  # most tokens along one branch, now

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text."""
        self.scorer.begin(prompt_ids)
        self._text, self._round, self._skipped = list(prompt_ids), None, 0
        self._len = self.config.start_len
        if self.draws:
            self.counts = AcceptanceCounts()

    def grow(self, request: DraftRequest) -> DraftRound:
        """Yield trees to be scored, one a forward, and return the tree to verify."""
        budget = min(request.budget, self.config.node_budget)
        self._request, self._round = request, None
        if budget < 1:
            return DraftTree.chain(self._text[-1])
        growth = self._growth()
        self._round = self._described = growth
        self._gain = self.counts.gain_curve(1 if self.draws else self.config.num_branches)
        self.forward_gain, self.forward_cost = self._first_gain(), self._min_gain
        tree = yield from (self._grow_by_drawing if self.draws else self._grow_best_first)(growth, budget)
        self._skipped += growth.num_forwards == 0
        return tree

    def _growth(self) -> Growth:
        return Growth(self._text[-1])

    def learn_from(self, result: DraftResult) -> None:
        """Count what was accepted, and let the draft follow the text."""
        tree, accepted = result.tree, result.accepted
        if self._round is not None:
            self._count(observations(self._round, accepted), self._round, result)
            self._round = None
        self.scorer.keep(tree, accepted)
        self._text += accepted

    def _count(self, seen: list[tuple[int, float, bool]], growth: Growth, result: DraftResult) -> None:
        """Learn what a round cost and brought; where all that may be drafted was accepted, more may be from now on."""
        num_nodes, num_tokens = result.tree.num_draft_tokens, len(result.accepted)
        if growth.num_forwards >= self._len and num_tokens > num_nodes:
            self._len = min(self._len + GROWTH, self.config.most_len)
        self.counts.record(seen, num_forwards=growth.num_forwards, num_nodes=num_nodes, num_tokens=num_tokens)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """The draft model drafts everything; with the estimated probability of each node."""
        assert self._described is not None or len(tree) == 1
        grown, described = [self._described.root] if self._described is not None else [], []
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            grown.append(grown[parent].children[token])
            described.append(DraftedNode(self.scorer.source, grown[-1].value))
        return tuple(described)

    def _grow_best_first(self, growth: Growth, budget: int) -> DraftRound:
        """Score the most promising nodes, forward by forward; keep the best `budget` candidates."""
        kept: list[Candidate] = []
        chosen, least = [growth.root], self.min_probability
        while chosen:
            try:
                rows = growth.rows_of(chosen, (yield growth.request(chosen)))
            except NoForward:
                break
            growth.num_forwards += 1
            if self.logits_processor is not None:
                scores = self._processed(chosen, rows.logits)
                if self._request.noise is not None:
                    scores = coupled(scores, [candidate.depth for candidate in chosen], self._request.noise)
                rows = NodeLogits(scores)
            kept += likeliest_children(chosen, rows, self.config.num_branches, self.counts)
            kept.sort(key=lambda candidate: -candidate.value)  # stable: a parent stays in front of its children
            del kept[budget:]
            weakest = kept[-1].value if len(kept) == budget else 0.0
            chosen = self._worth_scoring(growth, kept, max(weakest, least))
        if not self.chooses_size:
            return growth.keep(depth_first(growth.root, kept))
        return growth.keep(kept).with_probabilities((1.0, *[min(1.0, candidate.value) for candidate in kept]))

    def _grow_by_drawing(self, growth: Growth, budget: int) -> DraftRound:
        """Score, draw and go on below what was drawn; none is dropped, so that its value decides of nothing."""
        drafted_from: dict[int, torch.Tensor] = {}
        drawn: list[Candidate] = []
        chosen, least = [growth.root], self.min_probability
        while chosen and len(drawn) < budget and chosen[0].value * self.counts.mean(0) >= least:
            try:
                rows = yield growth.request(chosen)
            except NoForward:
                break
            growth.num_forwards += 1
            [probabilities] = self._processed(chosen, rows.logits).softmax(dim=-1)
            drafted_from[len(drawn)] = probabilities
            drawn.append(drawn_child(chosen[0], probabilities, self.counts, self.generator))
            chosen = self._worth_scoring(growth, drawn, least)
        return replace(growth.keep(drawn), drafted_from=drafted_from)  # their numbers are not read on the host

    def _worth_scoring(self, growth: Growth, candidates: list[Candidate], weakest: float) -> list[Candidate]:
        """The nodes for the next forward, likeliest first: those above `weakest` whose children are worth its time."""
        if growth.num_forwards >= self._num_levels:
            return []
        unscored = [c for c in candidates if c.scored_as is None and c.depth < self._num_levels]
        unscored.sort(key=lambda candidate: -candidate.value)
        if not self.scorer.takes_trees:
            unscored = [c for c in unscored if c.parent is growth.last_scored][:1]
        threshold = self.config.confidence_threshold
        if threshold is not None:
            self.forward_gain = None
            return [c for c in unscored if c.confidence >= threshold and c.value > weakest][:WIDTH]
        cost = self._min_gain * self._cost_of_node  # of a node more in a forward of the draft
        worth = self.tokens_a_node
        gains = [worth * c.value * self._gain(weakest / c.value) for c in unscored[:WIDTH]]  # the likelier, the more
        best = [c for c, gain in zip(unscored, gains, strict=False) if gain > cost]
        self.forward_gain = sum(gains[: len(best)]) - cost * (len(best) - 1)
        return best

    @property
    def _num_levels(self) -> int:
        """Largest depth of this round's tree."""
        return min(self._len, self._request.max_depth)

    @property
    def chooses_size(self) -> bool:
        """True if as many tokens are verified as are worth it: the configuration does not say how many."""
        return self.config.max_nodes is None and self.config.confidence_threshold is None

    @property
    def _cost_of_node(self) -> float:
        """Cost of a drafted token in the target's forward; 0 where the configuration says how many there are."""
        num_nodes = self._len if self.config.num_branches == 1 else self.config.node_budget
        return self.token_cost(self._request.num_rows, num_nodes) if self.chooses_size else 0.0

    @property
    def _tokens_per_cost(self) -> float:
        """Tokens that come about in the time of a step of one token; plain decoding's is 1."""
        return max(1.0, self.counts.tokens_per_cost(self.scorer.relative_cost, self._cost_of_node))

    @property
    def tokens_a_node(self) -> float:
        """The target's tokens that an accepted token of the draft is worth."""
        return 1.0

    @property
    def _min_gain(self) -> float:
        """Tokens that a forward of the draft has to gain."""
        return self.scorer.relative_cost * self._tokens_per_cost

    @property
    def min_probability(self) -> float:
        """Probability of acceptance that is worth what a drafted node adds to the target's forward."""
        return self._cost_of_node * self._tokens_per_cost

    def _first_gain(self) -> float | None:
        """Gain of the round's first forward; `None` where it is configured, or made to notice a change."""
        if self.config.confidence_threshold is not None:
            return None
        if (self._skipped + 1) % RETRY == 0:
            self._skipped += 1
            return None
        return self.tokens_a_node * self._gain(self.min_probability)

    def _processed(self, chosen: list[Candidate], rows: torch.Tensor) -> torch.Tensor:
        """The rows as the draft's processors leave them, each shown the text up to its node."""
        assert self.logits_processor is not None
        depths = [candidate.depth for candidate in chosen]
        return process_rows(self.logits_processor, rows, depths, self._text, lambda place: chosen[place].path())


def observations(growth: Growth, accepted: Sequence[int]) -> list[tuple[int, float, bool]]:
    """Rank, confidence and acceptance of the drafted tokens whose parents were accepted.

    Whether they were verified or not: which token follows their parent is known.
    """
    seen: list[tuple[int, float, bool]] = []
    candidate = growth.root
    for token in accepted:
        seen += [(child.rank, child.confidence, child.token == token) for child in candidate.children.values()]
        following = candidate.children.get(token)
        if following is None:
            break
        candidate = following
    return seen
