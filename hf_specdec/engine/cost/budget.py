"""Number of drafted tokens that a step verifies: as many as gain more tokens than their time gives otherwise.

A step's value is the tokens it is expected to add less the tokens that would come about in its time otherwise, by the
rate of the steps before it (so the rate itself grows as large as it can: Dinkelbach's rule for a ratio). The trees'
probabilities say what to expect, a `CostCurve` what a forward takes. Kernels compute tokens in tiles, so a forward of
one row costs as much as whole tiles: they are filled, and what fills them costs nothing. Rows of a batch share a
forward, so they are weighed together; those whose texts have ended and that cannot leave it cost as much, and bring
nothing. Where nothing gains its time, steps verify one token, as plain decoding does; where drafting itself does not
gain its time, drafters are paused, and tried again ever more rarely. Where rows are packed, each gets the nodes that
are likelier than any other row's left ones, and a forward costs what their mean number does. A draft network's time is
not part of that: drafters weigh each of its forwards by themselves.

What forwards of unknown sizes cost is found out by steps of these sizes, a few of them where many tokens are to come.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.cost.cost_model import CostCurve, StepCosts
from hf_specdec.forward.networks.runner_base import DraftForwards
from hf_specdec.methods.common.drafter import DraftCost

TILE = 4  # tokens that kernels compute at once, on CPUs; larger tiles hold whole ones of these
FADE = 0.97  # of what earlier steps brought, a step
FIRST_STEPS = 4.0  # plain steps that the rate starts with
RETRY = 64  # steps of one token after which a small tree is tried, so that a changed machine is noticed
RETRY_SIZE = 4
BATCH_MARGIN = 1.4  # times its time that a node of several rows has to gain: a batch ends with its slowest row
FIRST_CREDIT = 1.5  # tokens that drafting for one row may lose before it is paused, when nothing is known yet
CREDIT = 0.75  # the same after a pause; as much as it gains is added, up to the first
LEAST_CREDIT = 0.25  # several rows show as much sooner: what each may lose shrinks by their number, to this share
GREATEST_LOSS = 0.5  # of one step: more is a disturbance from outside
NEGLIGIBLE = 0.015  # loss of tokens a step that is no reason to pause: a paused drafter learns nothing
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 256  # steps of one row; several try as often together, up to the longest
GAIN_RATE = 0.1  # weight of a step in what drafting gains
EXPLORE_EVERY = 8  # steps from one of an unknown size to the next
EXPLORE_SHARE = 0.02  # of a call's time that such steps may add
LIKELY_TOKENS = 256  # that a text still gets, where its limit is further away


class Budget:
    """Weighs the drafts of one call.

    Args:
        costs: of the target; kept on the model, corrected by this call's steps.
        max_nodes: most drafted tokens a row.
        widths: sizes that forwards have, ascending, where they have few: each is as wide as the least that holds it.
            Without any, forwards of a single row cost as much as whole tiles.
    """

    def __init__(self, costs: StepCosts, *, max_nodes: int, widths: Sequence[int] = ()) -> None:
        self.costs, self.max_nodes, self.widths = costs, max_nodes, widths
        self._tokens = self._cost = FIRST_STEPS  # a row's tokens, and the time they took in steps of one token
        self._seconds_of_node = 0.0
        self._num_plain = self._num_steps = 0
        self._gain = 0.0  # tokens that drafting brings a step and row beyond what its time would bring otherwise
        self._expected = 0.0  # the same of this step, without the time of drafting
        self._credit, self._paused, self._next_pause = FIRST_CREDIT, 0, SHORTEST_PAUSE
        self._num_proposed = 0  # drafted tokens before the cut, all rows
        self._packs = False  # whether this step's rows are packed
        self._network: Hashable | None = None  # that may draft in this step
        self._seconds_of_reading: float | None = None  # by the target, a token of a prompt
        self._explored: set[int] = set()  # unknown sizes that were tried
        self._exploring, self._explored_at = 0, 0  # the size tried in this step, and when one was last
        self._instead = 1.0  # what the step would cost without trying it
        self._time = self._explored_time = 0.0  # of all steps, and added by trying sizes, in steps of one token

    @property
    def rate(self) -> float:
        """Tokens a live row that come about in the time of a step of one token; plain decoding's is 1."""
        return max(1.0, self._tokens / self._cost)

    @property
    def max_draft(self) -> int:
        """Most tokens worth drafting for a row in this step: where a size is tried, no more than fit in it."""
        return self._exploring - 1 if self._exploring else self.max_nodes

    def has_read(self, num_tokens: int, seconds: float) -> None:
        """The target has read so many tokens of prompts."""
        if not self.costs.is_fixed:
            self._seconds_of_reading = seconds / num_tokens

    def has_drafted(self, forwards: DraftForwards, num_rows: int) -> None:
        """A draft network has computed forwards for a step of so many rows."""
        seconds_of_one = self.costs.curve(num_rows).seconds_of_one
        if forwards.usual_cost and seconds_of_one is not None and not self.costs.is_fixed:
            speed = self.costs.draft_speed(self._network)
            speed.observe(forwards.usual_seconds / seconds_of_one, forwards.usual_cost)

    def draft_cost(self, num_rows: int, num_live: int, tokens_left: int, network: Hashable | None = None) -> DraftCost:
        """Gain that drafts of this step need; for a node of a paused drafter more than any has.

        Args:
            num_live: rows whose texts go on.
            tokens_left: most tokens that one of them may still get.
            network: what drafts for them, if a network does.
        """
        self._exploring, self._network = 0, network
        if self._paused:
            return DraftCost(of_node=math.inf, of_forward=math.inf)
        curve = self.costs.curve(num_rows)
        seconds_of_one = curve.seconds_of_one
        drafting = num_live * self._seconds_of_node / seconds_of_one if seconds_of_one else 0.0
        self._exploring = self._size_to_explore(curve, tokens_left, drafting)
        if self._exploring > 1:
            return DraftCost(of_node=0.0, of_forward=math.inf)
        slope = curve.least_slope(self.max_nodes + 1)  # shared with the other rows' nodes, as drafting is not
        speed = self.costs.draft_speeds.get(network)
        reading = self._seconds_of_reading
        return DraftCost(
            of_node=self.rate * (slope + drafting),
            of_nodes=functools.partial(self._tokens_of_nodes, curve, num_rows, drafting),
            of_forward=self.rate * (1.0 if speed is None else speed.factor),
            of_reading=self.rate
            * num_live
            * (reading / seconds_of_one if reading and seconds_of_one else curve.slope_assumed),
            num_steps=min(tokens_left, LIKELY_TOKENS) / self.rate,
        )

    def _tokens_of_nodes(self, curve: CostCurve, num_rows: int, drafting: float, count: int) -> float:
        """Tokens that come about in the time that so many nodes add to a step."""
        added = curve.ratio(self._width_of(1 + count, num_rows)) - 1.0
        return self.rate * (added + count * drafting) if count else 0.0

    def cut(self, trees: Sequence[DraftTree], num_live: int, *, packs: bool = False) -> list[DraftTree]:
        """The trees without what does not gain its time, each row's first branch in front.

        Args:
            num_live: rows whose texts go on.
            packs: whether rows are packed, so that none is as wide as another.
        """
        self._num_proposed = sum(tree.num_draft_tokens for tree in trees)
        num_rows = len(trees)
        self._packs = packs and num_rows > 1
        if self._paused:
            return list(trees)
        curve = self.costs.curve(num_rows)
        if self._packs:
            sizes, width = self._best_sizes(trees, num_live, curve)
        else:
            width, self._expected = self._best_size(trees, num_live, curve)
            sizes = [width] * len(trees)
        if self._exploring:
            self._explored.add(self._exploring)
            self._explored_at = self._num_steps
            self._instead, sizes = curve.ratio(width), [self._exploring] * len(trees)
        elif max(sizes) == 1:
            self._num_plain += 1
            if self._num_plain % RETRY == 0:
                sizes = [RETRY_SIZE] * len(trees)
        else:
            self._num_plain = 0
        cut = zip(trees, sizes, strict=True)
        return [tree.truncated(max_nodes=size - 1).first_branch_first() for tree, size in cut]

    def record(
        self,
        trees: Sequence[DraftTree],
        num_live: int,
        *,
        num_tokens: int,
        seconds: float,
        draft_seconds: float,
        forwards: DraftForwards | None = None,
    ) -> None:
        """After a step: correct costs and rate.

        Args:
            num_live: rows whose texts went on when it began.
            num_tokens: tokens that the step added to all rows.
            seconds: of the step without drafting.
            draft_seconds: of drafting.
            forwards: of the draft network, whose time is a part of `draft_seconds`.
        """
        forwards = forwards or DraftForwards()
        widest: float = self._width_of(max(tree.num_columns for tree in trees), len(trees))
        if self._packs:
            widest = _packed_width(sum(tree.num_columns for tree in trees), len(trees))
        curve = self.costs.curve(len(trees))
        self._num_steps += 1
        if self.costs.is_fixed:
            draft_seconds, forwards = 0.0, DraftForwards()
        if self._num_steps > 1:  # the first step of a call may compile, or allocate
            curve.observe(widest, seconds)
        if curve.seconds_of_one is None:
            return
        self._tokens = FADE * self._tokens + num_tokens / num_live
        time = curve.ratio(widest) + draft_seconds / curve.seconds_of_one
        self._cost, self._time = FADE * self._cost + time, self._time + time
        draft_seconds -= forwards.seconds
        if self._num_proposed:
            self._seconds_of_node += 0.1 * (draft_seconds / self._num_proposed - self._seconds_of_node)
        if self._exploring:
            self._explored_time += max(0.0, (seconds + draft_seconds) / curve.seconds_of_one - self._instead)
        else:
            gain = self._expected / num_live - self.rate * draft_seconds / curve.seconds_of_one
            self._pause_or_go_on(gain, num_live)
        curve.least_slope(self.max_nodes + 1)  # which the next step asks for, while the device has no work

    def _width_of(self, num_columns: int, num_rows: int) -> int:
        """Number of columns that a forward of `num_columns` takes the time of."""
        if not self.widths and num_rows == 1 and num_columns > 2:
            return -(-num_columns // TILE) * TILE
        return next((width for width in self.widths if width >= num_columns), num_columns)

    def _size_to_explore(self, curve: CostCurve, tokens_left: int, drafting: float) -> int:
        """A size that no one knows the cost of and that the tokens still to come can afford; 0 for none."""
        is_next = curve.counts[0] == 0  # all others are told by that of one
        if self._num_steps == 0 or (self._num_steps < self._explored_at + EXPLORE_EVERY and not is_next):
            return 0
        affordable = EXPLORE_SHARE * (self._time + tokens_left / self.rate) - self._explored_time
        unknown = (size for size in curve.unknown(self.max_nodes + 1) if size not in self._explored)
        return next((size for size in unknown if curve.ratio(size) - 1.0 + (size - 1) * drafting <= affordable), 0)

    def _pause_or_go_on(self, gain: float, num_live: int) -> None:
        """Pause the drafters where the last steps' drafts gained less than their own time: `gain` tokens a row."""
        share = max(1.0 / num_live, LEAST_CREDIT)  # of a single row's credit
        if self._paused:
            self._paused -= 1
            self._credit = CREDIT * share
            return
        gain = max(gain, -GREATEST_LOSS)
        self._gain += GAIN_RATE * (gain - self._gain)
        self._credit = min(FIRST_CREDIT * share, self._credit + gain)
        if self._gain > 0.0:
            self._next_pause = SHORTEST_PAUSE
        elif self._credit < 0.0 and self._gain < -NEGLIGIBLE:
            self._paused = min(num_live * self._next_pause, LONGEST_PAUSE)
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            self._gain = 0.0

    def _best_sizes(self, trees: Sequence[DraftTree], num_live: int, curve: CostCurve) -> tuple[list[int], float]:
        """The number of columns of each packed row with the greatest value together, and the width of the forward."""
        num_rows, time_value = len(trees), BATCH_MARGIN * self.rate * num_live
        chances = [list(tree.probabilities or ())[1 : self.max_nodes + 1] for tree in trees]
        columns = sum(tree.num_columns - len(tree) + 1 for tree in trees)
        width = alone = _packed_width(columns, num_rows)
        least, value, self._expected = math.inf, 0.0, 0.0
        for count, chance in enumerate(sorted(itertools.chain(*chances), reverse=True), columns + 1):
            value += chance
            of_count = _packed_width(count, num_rows)
            gain = value - time_value * (curve.ratio(of_count) - curve.ratio(alone))
            if gain > self._expected:
                least, width, self._expected = chance, of_count, gain
        return [1 + sum(chance >= least for chance in row) for row in chances], width

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
        margin = BATCH_MARGIN if num_live > 1 else 1.0
        time_value = margin * self.rate * num_live  # tokens that come about in the time of one forward
        extra = max(tree.num_columns - len(tree) for tree in trees)  # drafters weigh these themselves
        best, best_value, value = 1, 0.0, 0.0
        width, lost, alone = 0, 0.0, 0.0  # of the forward of each size; tokens lost by its time, and by that of size 1
        for size in range(1, largest + 1):
            if size + extra > width:
                width = self._width_of(size + extra, len(trees))
                lost = time_value * curve.ratio(width)
                alone = alone or lost
            value += gains[size]
            gain = value - lost + alone
            if gain > best_value:
                best, best_value = size, gain
        return best, best_value


def _packed_width(num_columns: int, num_rows: int) -> float:
    """Columns a row that a forward of packed rows takes the time of: it is computed by whole tiles."""
    return -(-num_columns // TILE) / -(-num_rows // TILE)
