"""How often tokens drafted with a probability p were accepted: corrects p by what happened.

Knows nothing about where a probability comes from. Safe to share between threads.
"""

from array import array
from collections.abc import Iterable

from hf_specdec.methods.common.shared_state import SharedState

NUM_BINS = 20
PRIOR = 6.0  # accepted tokens as which being right from the start counts
MAX_EXPECTED = 100.0  # where a bin has expected so many, its counts are halved: old ones fade
MOST = 0.995


class Calibration(SharedState):
    """A factor for each of 20 bins of probability: accepted tokens over those expected."""

    def __init__(self) -> None:
        super().__init__()
        self._expected = array("d", [0.0] * NUM_BINS)
        self._accepted = array("d", [0.0] * NUM_BINS)
        self.factors = array("d", [1.0] * NUM_BINS)

    @property
    def arrays(self) -> "tuple[array[float], array[float], array[float]]":
        """Tokens expected, tokens accepted and factors, as the compiled core takes them."""
        return self._expected, self._accepted, self.factors

    def corrected(self, probability: float) -> float:
        """The share of tokens drafted with this probability that is accepted."""
        return min(MOST, probability * self.factors[min(NUM_BINS - 1, int(probability * NUM_BINS))])

    def record(self, outcomes: Iterable[tuple[float, bool]]) -> None:
        """Add drafted tokens whose parents were accepted: the uncorrected probability of each, and what became of it.

        Each bin's share moves towards what was seen; few outcomes move it little.
        """
        with self._lock:
            for probability, accepted in outcomes:
                place = min(NUM_BINS - 1, int(probability * NUM_BINS))
                self._expected[place] += probability
                self._accepted[place] += accepted
                if self._expected[place] > MAX_EXPECTED:
                    self._expected[place] /= 2
                    self._accepted[place] /= 2
                self.factors[place] = (self._accepted[place] + PRIOR) / (self._expected[place] + PRIOR)

    def counts(self) -> tuple[list[float], list[float]]:
        """Tokens expected and tokens accepted, by bin."""
        with self._lock:
            return list(self._expected), list(self._accepted)

    def restore(self, expected: list[float], accepted: list[float]) -> None:
        """Go on from these counts."""
        with self._lock:
            self._expected, self._accepted = array("d", expected), array("d", accepted)
            both = zip(accepted, expected, strict=True)
            self.factors = array("d", [(right + PRIOR) / (wanted + PRIOR) for right, wanted in both])
