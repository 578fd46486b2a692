"""Estimates the times of forwards from noisy samples: a Kalman filter over the logarithms of t(1) and of t(T)/t(1).

A machine's speed drifts from step to step, the shape of the curve hardly does; the covariance tells them apart. Where a
first forward of one token was disturbed, the next one corrects it and all ratios that were learned next to it at once.
Source: https://doi.org/10.1115/1.3662552. Knows nothing of drafts.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NOISE = 0.12  # standard deviations of logarithms: of a single time,
DRIFT = 0.03  # of what the speed of all forwards changes by from step to step,
SHAPE_DRIFT = 0.003  # and a ratio that it tells of;
JUMP = 0.15  # of what is assumed of the second size over the first,
STEPS = 0.06  # and of each further size over the one before
LARGEST_SURPRISE = math.log(2.0)  # a step that took longer was disturbed from outside
SHORTEST = 1e-9  # seconds, of clocks that stand still


class TimeEstimate:
    """The time of forwards of one row count, by their size.

    Args:
        sizes: `(S,)` the sizes whose ratios are estimated, ascending, 1 the first.
        ratios: `(S,)` t(T)/t(1) of each as assumed or measured.
        counts: `(S,)` times that each ratio was learned from; 0 for what is assumed.
        seconds_of_one: t(1), if it is known.
    """

    def __init__(
        self, sizes: Sequence[int], ratios: Sequence[float], counts: Sequence[int], seconds_of_one: float | None
    ) -> None:
        self._sizes = sizes
        spread = np.array([0.0, JUMP, *[STEPS] * (len(sizes) - 2)]) ** 2
        sums = np.tril(np.ones((len(sizes), len(sizes))))
        mean, covariance = np.log(np.array(ratios)), sums @ np.diag(spread) @ sums.T  # (S,), (S, S)
        for place, count in enumerate(counts):
            if place and count:
                mean, covariance = _updated(mean, covariance, np.eye(len(sizes))[place], 0.0, NOISE**2 / count)
        self._is_timed = seconds_of_one is not None
        if seconds_of_one is not None:
            mean[0], covariance[0, 0] = math.log(seconds_of_one), NOISE**2
        self._state = mean, covariance

    def observe(self, size: float, seconds: float) -> tuple[float, list[float]]:
        """Learn from a forward of `size` tokens a row.

        Returns:
            `tuple[float, list[float]]`: t(1) in seconds, and the `S` ratios.
        """
        mean, covariance = self._state
        seconds = max(seconds, SHORTEST)
        weights, ratio = self._weights(mean, size)
        if self._is_timed:
            drift = SHAPE_DRIFT**2 * weights
            drift[0] = DRIFT**2
            surprise = math.log(seconds) - mean[0] - ratio
            surprise = max(-LARGEST_SURPRISE, min(LARGEST_SURPRISE, surprise))
            weights[0] = 1.0
            mean, covariance = _updated(mean, covariance + np.diag(drift), weights, surprise, NOISE**2)
        else:  # then t(1) is what follows from the ratio, and as uncertain
            mean, covariance = mean.copy(), covariance.copy()
            of_ratio = covariance @ weights
            mean[0] = math.log(seconds) - ratio
            covariance[0], covariance[:, 0] = -of_ratio, -of_ratio
            covariance[0, 0] = weights @ of_ratio + NOISE**2
            self._is_timed = True
        self._state = mean, covariance
        return math.exp(mean[0]), [1.0, *np.exp(mean[1:]).tolist()]

    def _weights(self, mean: npt.NDArray[np.float64], size: float) -> tuple[npt.NDArray[np.float64], float]:
        """Weight of each logarithm in that of t(`size`)/t(1), and the latter: linear between the sizes."""
        weights = np.zeros(len(mean))
        if size <= 1:
            return weights, 0.0
        right = min(max(bisect_left(self._sizes, size), 1), len(mean) - 1)
        share = min(1.0, (size - self._sizes[right - 1]) / (self._sizes[right] - self._sizes[right - 1]))
        before = 1.0 if right == 1 else math.exp(mean[right - 1])
        lower, upper = (1.0 - share) * before, share * math.exp(mean[right])
        weights[right - 1], weights[right] = lower / (lower + upper), upper / (lower + upper)
        weights[0] = 0.0
        return weights, math.log(lower + upper)


def _updated(
    mean: npt.NDArray[np.float64],
    covariance: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    surprise: float,
    noise: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and covariance after a sum of `weights` was seen with a variance of `noise`, `surprise` above its mean."""
    seen = covariance @ weights
    gain = seen / (weights @ seen + noise)
    return mean + gain * surprise, covariance - np.outer(gain, seen)
