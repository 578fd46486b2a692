"""How many drafted tokens a step verifies: as many as bring more tokens than their time is worth.

A step's value is the tokens it is expected to add less the tokens that would come about in its time otherwise, by the
rate of the steps before it (so the rate itself grows as large as it can: Dinkelbach's rule for a ratio). The trees'
probabilities say what to expect, a `CostCurve` what a forward takes. Rows of a batch share a forward, so they are
weighed together; those whose texts have ended and that cannot leave it cost as much, and bring nothing. Where nothing
is worth its time, steps verify one token, as plain decoding does; where drafting itself is not worth its time, drafters
rest, and try again ever more rarely.

    budget = Budget(costs, max_nodes=64, vocab_size=32000)
    budget.prepare(target, roots, largest=65, agreement=agreement)
    worth = budget.worth(num_rows, num_live)    # for the drafters
    trees = budget.cut(trees, num_live)
    budget.record(trees, num_live, num_tokens=3, seconds=0.04, draft_seconds=0.001)
"""

import math
from collections.abc import Sequence

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.cost_model import CostCurve, StepCosts, measure
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.methods.base import DraftCost
from hf_specdec.tree import DraftTree

__all__ = ["Budget"]

FADE = 0.97  # of what earlier steps brought, a step
FIRST_STEPS = 4.0  # plain steps that the rate starts with
RETRY = 64  # steps of one token after which a small tree is tried, so that a changed machine is noticed
RETRY_SIZE = 4
FIRST_CREDIT = 1.5  # tokens a row that drafting may lose before it rests, when nothing is known yet
CREDIT = 0.75  # the same after a rest; as much as it brings is added, up to the first
GREATEST_LOSS = 0.5  # of one step: more is a disturbance from outside
NEGLIGIBLE = 0.015  # loss of tokens a step that is no reason to rest: who rests learns nothing
SHORTEST_REST, LONGEST_REST = 16, 256  # steps
MEMORY_OF_GAIN = 0.1  # weight of a step in what drafting gains
MEASURE_AFTER = 2  # steps that show whether a forward is quick enough to be measured


class Budget:
    """Weighs the drafts of one call.

    Args:
        costs: of the target; kept on the model, corrected by this call's steps.
        max_nodes: most drafted tokens a row.
        vocab_size: tokens that the target knows.
    """

    def __init__(self, costs: StepCosts, *, max_nodes: int, vocab_size: int) -> None:
        self.costs, self.max_nodes, self.vocab_size = costs, max_nodes, vocab_size
        self._tokens = self._cost = FIRST_STEPS  # a row's tokens, and the time they took in steps of one token
        self._seconds_of_node = 0.0
        self._num_plain = self._num_steps = 0
        self._gain = 0.0  # tokens that drafting brings a step and row beyond what its time would bring otherwise
        self._expected = 0.0  # the same of this step, without the time of drafting
        self._credit, self._resting, self._next_rest = FIRST_CREDIT, 0, SHORTEST_REST

    @property
    def rate(self) -> float:
        """Tokens a live row that come about in the time of a step of one token; plain decoding's is 1."""
        return max(1.0, self._tokens / self._cost)

    def prepare(self, target: ModelRunner, roots: Sequence[int], *, largest: int, rank_sync: RankSync) -> None:
        """Before a step: measure what forwards of so many rows cost, if nobody knows yet and they are quick enough.

        Args:
            roots: the last token of each row's text.
            largest: most columns a row that the target has room for.
            agreement: of the processes that compute the target's forwards together.
        """
        curve = self.costs.curve(len(roots))
        if not curve.is_measured and self._num_steps >= MEASURE_AFTER and curve.seconds_of_one is not None:
            measure(target, curve, roots, vocab_size=self.vocab_size, largest=largest, rank_sync=rank_sync)

    def worth(self, num_rows: int, num_live: int) -> DraftCost:
        """What drafts of this step have to bring; a node of a resting drafter more than any can.

        Args:
            num_live: rows whose texts go on.
        """
        if self._resting:
            return DraftCost(of_node=math.inf, of_forward=math.inf)
        curve = self.costs.curve(num_rows)
        one = curve.seconds_of_one
        drafting = self._seconds_of_node / one if one else 0.0
        widening = curve.slope(self.max_nodes + 1)  # shared with the other rows' nodes, as drafting is not
        return DraftCost(of_node=self.rate * (widening + num_live * drafting), of_forward=self.rate)

    def cut(self, trees: Sequence[DraftTree], num_live: int) -> list[DraftTree]:
        """The trees without what is not worth its time, each row's first branch in front."""
        if self._resting:
            return list(trees)
        curve = self.costs.curve(len(trees))
        size, self._expected = self._best_size(trees, num_live, curve)
        if size == 1:
            self._num_plain += 1
            if self._num_plain % RETRY == 0:
                size = RETRY_SIZE
        else:
            self._num_plain = 0
        return [tree.truncated(max_nodes=size - 1).first_branch_first() for tree in trees]

    def record(
        self, trees: Sequence[DraftTree], num_live: int, *, num_tokens: int, seconds: float, draft_seconds: float
    ) -> None:
        """After a step: correct costs and rate.

        Args:
            num_live: rows whose texts went on when it began.
            num_tokens: tokens that the step added to all rows.
            seconds: of the step without drafting.
            draft_seconds: of drafting.
        """
        widest = max(tree.num_columns for tree in trees)
        curve = self.costs.curve(len(trees))
        self._num_steps += 1
        if self._num_steps > 1:  # the first step of a call may compile, or allocate
            curve.observe(widest, seconds)
        if curve.seconds_of_one is None:
            return
        self._tokens = FADE * self._tokens + num_tokens / num_live
        self._cost = FADE * self._cost + curve.ratio(widest) + draft_seconds / curve.seconds_of_one
        num_drafted = sum(tree.num_draft_tokens for tree in trees)
        if num_drafted:
            self._seconds_of_node += 0.1 * (draft_seconds / num_drafted - self._seconds_of_node)
        self._rest_or_try(self._expected / num_live - self.rate * draft_seconds / curve.seconds_of_one)

    def _rest_or_try(self, gain: float) -> None:
        """Let the drafters rest where the last steps' drafts brought less than their own time."""
        if self._resting:
            self._resting -= 1
            self._credit = CREDIT
            return
        gain = max(gain, -GREATEST_LOSS)
        self._gain += MEMORY_OF_GAIN * (gain - self._gain)
        self._credit = min(FIRST_CREDIT, self._credit + gain)
        if self._gain > 0.0:
            self._next_rest = SHORTEST_REST
        elif self._credit < 0.0 and self._gain < -NEGLIGIBLE:
            self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            self._gain = 0.0

    def _best_size(self, trees: Sequence[DraftTree], num_live: int, curve: CostCurve) -> tuple[int, float]:
        """The number of columns a row with the greatest value, and how much more that is than one column's."""
        gains = [0.0] * (self.max_nodes + 2)  # by size: what the node that is the last of that size adds, all rows
        largest = 1
        for tree in trees:
            if tree.probabilities is None:
                continue
            for size, probability in enumerate(tree.probabilities[1 : self.max_nodes + 1], 2):
                gains[size] += probability
            largest = max(largest, min(len(tree), self.max_nodes + 1))
        price = self.rate * num_live
        extra = max(tree.num_columns - len(tree) for tree in trees)  # drafters weigh these themselves
        alone = price * curve.ratio(1 + extra)
        best, best_value, value = 1, 0.0, 0.0
        for size in range(2, largest + 1):
            value += gains[size]
            worth = value - price * curve.ratio(size + extra) + alone
            if worth > best_value:
                best, best_value = size, worth
        return best, best_value
