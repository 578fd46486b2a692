"""Cost of the target's forwards: t(T)/t(1) for T tokens a row, by the number of rows; learned.

Decoding teaches it, by the time of each step. Knows nothing of drafts or of
what they gain. Safe to share between threads: a lost correction is made up for by the next.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from statistics import median_low

import torch

from hf_specdec.compat.devices import computes_halves
from hf_specdec.engine.cost.time_estimate import TimeEstimate
from hf_specdec.methods.common.drafter import TOKEN_COST

LEAST = 0.5  # of a ratio: noise makes no forward free
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ORDER = (1, 8, 32, 2, 64, 4, 16, 12, 24, 48)  # first those that tell most
SLOPES = {"cpu": TOKEN_COST}  # cost of one more token before anything is known, over a forward of one
SLOPE = 0.004  # on accelerators
JUMPS = {"cpu": 0.25}  # what several tokens add on top, whatever their number: of one row, in fp32
HALF_SLOPE = 0.015  # of halves, on a CPU that has instructions for them: reading the weights bounds forwards of
NUM_READ_BOUND = 12  # tokens and fewer; computing bounds larger ones
FAR = 8  # tokens: sizes from here on tell what each of them costs
NUM_SPEEDS = 9  # steps that a draft network's speed is the median of
MOST_NETWORKS = 64  # whose speeds are kept
SLOWEST = 32.0  # over what is assumed of a draft network; one that is never asked is never timed again


class CostCurve:
    """Cost of a forward of T tokens a row over one of a single token, for one number of rows.

    Attributes:
        ratios (`list[float]`): at `SIZES`, lines in between; the last line goes on.
        counts (`list[int]`): steps that each of these sizes was learned from; sizes without any follow the others.
        seconds_of_one (`float | None`): time of a step with a single token now; `None` before the first one.
        is_fixed (`bool`): whether no step corrects it.

    Args:
        slope: what one more token is assumed to cost, before anything is known.
    """

    def __init__(self, slope: float) -> None:
        self.slope_assumed = slope
        self.ratios = [1.0 + slope * (size - 1) for size in SIZES]
        self.counts = [0] * len(SIZES)
        self.seconds_of_one: float | None = None
        self.is_fixed = False
        self._estimate: TimeEstimate | None = None  # from the first step on
        self._slopes: dict[int, float] = {}  # of these ratios

    @property
    def is_known(self) -> bool:
        """Returns whether steps have taught it more than one size."""
        return sum(count > 0 for count in self.counts) > 1

    def ratio(self, num_columns: float) -> float:
        """t(T)/t(1); below 1 the first line goes on."""
        right = min(max(bisect_left(SIZES, num_columns), 1), len(SIZES) - 1)
        left = right - 1
        share = (num_columns - SIZES[left]) / (SIZES[right] - SIZES[left])
        return self.ratios[left] + share * (self.ratios[right] - self.ratios[left])

    def least_slope(self, limit: int) -> float:
        """Cost of each token after the second, in a forward of the size at which that is least.

        Args:
            limit: the largest size that counts.
        """
        if limit not in self._slopes:
            second = self.ratio(2)
            sizes = [size for size in SIZES if 2 < size <= limit]
            far = [size for size in sizes if size >= FAR] or sizes  # between near ones noise decides
            slopes = [(self.ratio(size) - second) / (size - 2) for size in far]
            self._slopes[limit] = max(0.0, min(slopes, default=second - 1.0))
        return self._slopes[limit]

    def unknown(self, limit: int) -> list[int]:
        """Sizes up to `limit` that nothing was learned from, those that would tell most first."""
        if self.is_fixed:
            return []
        return [size for size in ORDER if size <= limit and not self.counts[SIZES.index(size)]]

    def of_share(self, share: float) -> "CostCurve":
        """The curve of a share of the rows, if a forward's time depends on its tokens alone."""
        curve, time = CostCurve(0.0), max(share, self.ratio(share))
        curve.ratios = [max(LEAST, self.ratio(size * share) / time) for size in SIZES]
        curve.seconds_of_one = None if self.seconds_of_one is None else self.seconds_of_one * time
        curve.slope_assumed = self.slope_assumed
        curve.counts = [int(self.is_known)] * len(SIZES)
        return curve

    def observe(self, num_columns: float, seconds: float) -> None:
        """Correct the curve by a step that was taken, the ratios of other sizes too as far as they depend on it."""
        if self.is_fixed:
            return
        if self._estimate is None:
            self._estimate = TimeEstimate(SIZES, self.ratios, self.counts, self.seconds_of_one)
        is_first = self.seconds_of_one is None  # which tells what one token takes, by the ratio that is assumed
        self.seconds_of_one, ratios = self._estimate.observe(num_columns, seconds)
        self.ratios = [max(LEAST, ratio) for ratio in ratios]
        self._slopes = {}
        others = range(1, len(SIZES))
        place = 0 if num_columns == 1 else min(others, key=lambda place: abs(SIZES[place] - num_columns))
        self.counts[place] += not is_first or place == 0


class DraftSpeed:
    """Ratio of the time of a draft network's forwards to that expected by its size: the median of the last steps.

    What was assumed counts as one step, so that a single disturbed one tells nothing, and two tell enough.

    Attributes:
        factor (`float`): 1 where it takes what was assumed.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._last = deque([self.factor], maxlen=NUM_SPEEDS)

    def observe(self, measured: float, assumed: float) -> None:
        """Correct it by the forwards of a step, both in forwards of the target."""
        self._last.append(min(measured / assumed, SLOWEST))
        self.factor = median_low(self._last)


class StepCosts:
    """The curves of one model on one device, by the number of rows, and what its draft networks take.

    Attributes:
        draft_speeds (`dict[Hashable, DraftSpeed]`): of each draft network.
        is_fixed (`bool`): whether no step corrects them, so that nothing follows from the clock.
    """

    def __init__(self, slope: float, jump: float = 0.0, *, is_fixed: bool = False) -> None:
        self._slope, self._jump, self.is_fixed = slope, jump, is_fixed
        self._curves: dict[int, CostCurve] = {}
        self.draft_speeds: dict[Hashable, DraftSpeed] = {}

    def draft_speed(self, network: Hashable) -> DraftSpeed:
        """Speed of a draft network, made at first use; kept for the last `MOST_NETWORKS` ones."""
        if network not in self.draft_speeds and len(self.draft_speeds) >= MOST_NETWORKS:
            del self.draft_speeds[next(iter(self.draft_speeds))]
        return self.draft_speeds.setdefault(network, DraftSpeed())

    @classmethod
    def of_device(cls, device: torch.device, *, loading: float = 1.0, is_fixed: bool = False) -> "StepCosts":
        """With what is assumed of the device before anything is measured.

        Args:
            loading: how many times as long a forward takes as its computation, where weights are brought in for it.
        """
        slope, jump = SLOPES.get(device.type, SLOPE), JUMPS.get(device.type, 0.0)
        return cls(slope / loading, jump / loading, is_fixed=is_fixed)

    def curve(self, num_rows: int) -> CostCurve:
        """The curve of as many rows, rounded up to a power of two; at first that of more rows, where one is known.

        So nothing is learned anew as rows leave a batch.
        """
        rows = 1 << max(num_rows - 1, 0).bit_length()
        if rows not in self._curves:
            more = min(
                [number for number, curve in self._curves.items() if curve.is_known and number > rows], default=0
            )
            curve = self._curves[more].of_share(rows / more) if more else CostCurve(_for_rows(self._slope, rows))
            self._curves[rows] = curve
            if self.is_fixed:
                curve.is_fixed, curve.seconds_of_one = True, 1.0
        return self._curves[rows]

    def token_cost(self, num_rows: int, num_nodes: int, *, dtype: torch.dtype) -> float:
        """Cost of each further token a row over a forward of one token a row, before anything is measured.

        What steps teach is left out: it follows the clock, and the same call drafts the same.

        Args:
            num_nodes: drafted tokens that a row has then.
            dtype: of the weights.
        """
        slope = self._slope
        is_half = dtype.itemsize < torch.float32.itemsize and computes_halves(dtype)
        if is_half and num_rows * (num_nodes + 1) <= NUM_READ_BOUND:
            slope = min(slope, HALF_SLOPE)
        return _for_rows(slope, num_rows)

    def jump(self, num_rows: int, dtype: torch.dtype) -> float:
        """Fixed cost of a forward of several tokens a row, in addition to `token_cost`, before anything is measured.

        Args:
            dtype: of the weights.
        """
        is_vector = num_rows == 1 and dtype.itemsize >= torch.float32.itemsize  # where a row has one token
        return self._jump if is_vector else 0.0


def _for_rows(slope: float, rows: int) -> float:
    """The slope of so many rows, if a forward's time depends on its tokens alone."""
    return slope * rows / (1.0 + slope * (rows - 1))
