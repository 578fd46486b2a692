"""What `auto` learned about its sources: weights of the blend, how far it is right, what drafts and windows add.

Knows nothing of texts. Safe to share between threads.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_specdec.methods.auto.calibration import Calibration
from hf_specdec.methods.auto.mixer import Mixer
from hf_specdec.methods.auto.recycled_logits import MAX_KEY

__all__ = ["AdaptiveWeights"]

MATCH_KINDS = (0, 1, 2, 3, 4, 4, 5)  # kind of a context by its longest match; longer ones are like the last
INITIAL_GAIN = 1.0
GAIN_RATE = 0.1  # weight of a forward in what such forwards gain; of the first ones more, their mean
SETTLED = 10  # forwards that gains read from a file count as
WINDOW_RATE = 0.03
NUM_MATCH_KINDS = max(MATCH_KINDS) + 1
BIAS = -6.8
# Where a draft was asked: bias, weight of its log odds, shares of what matches and logits weigh elsewhere, of the rest.
GREEDY, SAMPLED = (-9.9, 1.5, 0.3, 1.0), (-6.8, 1.0, 0.05, 0.15)


def _prior(drafted: tuple[float, float, float, float] = GREEDY) -> list[tuple[float, ...]]:
    """Weights to start with: as they came out on prompts of Python code, rounded; a draft's on four to eight tasks.

    Args:
        drafted: a greedy target takes the likeliest token more often than the draft says, and the others less often.
            Of drawn tokens the draft's probabilities say more, so that other sources add less.
    """
    own = (0.0, 0.1, 0.2, 0.35, 0.6, 0.9)  # by the kind of match
    recycled = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.7), (0.0, 0.6, 0.35), (0.45, 0.25, 0.2))  # by the longest key found
    return [
        (bias, *[weight * share for weight in (own[match], 0.15, *shares)], 0.8 * rest, of_draft, 0.2 * rest)
        for bias, of_draft, share, rest in ((BIAS, 0.0, 1.0, 1.0), drafted)
        for match in range(NUM_MATCH_KINDS)
        for shares in recycled
    ]


@dataclass(slots=True)
class AdaptiveWeights:
    """What was learned about the sources, apart for greedy and for sampled texts.

    Attributes:
        gains (`list[float]`): expected tokens that a draft model's first, second, ... forward of a step and those after
            it add, less the cost of those after it.
        num_gains (`list[int]`): forwards that each of `gains` was learned from, where it was not read from a file.
        retry_credit (`float`): tokens that forwards which do not pay may lose.
        window_gain (`float`): tokens a step that are drafted and accepted because of lookahead's window.
    """

    INITIAL_WINDOW_GAIN: ClassVar[float] = 0.05  # of a window that nobody has tried

    mixer: Mixer = field(default_factory=lambda: Mixer(_prior()))
    calibration: Calibration = field(default_factory=Calibration)
    gains: list[float] = field(default_factory=list)
    num_gains: list[int] = field(default_factory=list)
    retry_credit: float = 0.0
    window_gain: float = INITIAL_WINDOW_GAIN

    @classmethod
    def of_sampled(cls) -> "AdaptiveWeights":
        """Those that sampled texts begin with."""
        return cls(mixer=Mixer(_prior(SAMPLED)))

    def gain(self, number: int) -> float:
        """What the draft model's forward `number`, counted from 0, may add; hopeful of the first that nobody tried."""
        if number > len(self.gains):
            return 0.0
        return self.gains[number] if number < len(self.gains) else INITIAL_GAIN

    def gained(self, number: int, tokens: float) -> None:
        """The forward `number` added so many expected tokens."""
        if number == len(self.gains):
            self.gains.append(INITIAL_GAIN)
            self.num_gains.append(0)
        while len(self.num_gains) < len(self.gains):
            self.num_gains.append(SETTLED)
        self.num_gains[number] += 1
        rate = max(GAIN_RATE, 1.0 / (self.num_gains[number] + 1))
        self.gains[number] += rate * (tokens - self.gains[number])

    def may_retry(self, credit: float, cost: float) -> bool:
        """Whether a forward that does not pay is made all the same; each that is not adds `credit` tokens for one."""
        self.retry_credit = min(self.retry_credit + credit, cost)
        if self.retry_credit < cost:
            return False
        self.retry_credit = 0.0
        return True

    def window_gained(self, tokens: float) -> None:
        """A step with a window had so many tokens because of it."""
        self.window_gain += WINDOW_RATE * (tokens - self.window_gain)

    @staticmethod
    def kind(longest_match: int, longest_key: int, is_drafted: bool) -> int:
        """Kind of a context by the longest match in this text, the longest recycled key, and the draft model."""
        match = MATCH_KINDS[min(longest_match, len(MATCH_KINDS) - 1)]
        return (is_drafted * NUM_MATCH_KINDS + match) * (MAX_KEY + 1) + longest_key
