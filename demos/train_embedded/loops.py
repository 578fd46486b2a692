"""What counts as a loop in a text."""

import torch
import torch.nn.functional as F

MAX_PERIOD, COPIES, MIN_TOKENS = 48, 3, 8


def loop_mask(ids: torch.Tensor) -> torch.Tensor:
    """Where a text loops: True from a period's third copy in a row on. `(batch, length)` bool, as `ids`.

    A period of p tokens counts from `COPIES` copies on, and only over at least `MIN_TOKENS` tokens in all.
    """
    return loop_periods(ids) > 0


def loop_periods(ids: torch.Tensor) -> torch.Tensor:
    """The shortest period of the loops that hold a token in their third copy or later; 0 where there is none.

    Shape and dtype are those of `ids`, `(batch, length)` int64.
    """
    periods = torch.zeros_like(ids)
    length = ids.shape[1]
    for period in range(1, min(MAX_PERIOD, length // COPIES) + 1):
        run = _equal_tokens(period)
        same = torch.zeros_like(ids, dtype=torch.bool)
        same[:, period:] = ids[:, period:] == ids[:, :-period]
        total = F.pad(same.int().cumsum(1), (1, 0))
        full = F.pad((total[:, run:] - total[:, :-run]) == run, (run - 1, 0))
        periods[full & (periods == 0)] = period
    return periods


def _equal_tokens(period: int) -> int:
    """How many tokens in a row, each equal to the one a period before it, make a loop."""
    return max(period * (COPIES - 1), MIN_TOKENS - period)
