"""What `auto` learned about its sources: weights of the blend, how far it is right, what drafts and windows add.

Knows nothing of texts. Safe to share between threads.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from hf_specdec.methods.auto.calibration import Calibration
from hf_specdec.methods.auto.mixer import Mixer
from hf_specdec.methods.auto.recycled_logits import MAX_KEY

MATCH_KINDS = (0, 1, 2, 3, 4, 4, 5)  # kind of a context by its longest match; longer ones are like the last
INITIAL_GAIN = 1.0
GAIN_RATE = 0.05  # weight of a forward in what such forwards gain; of the first ones more, their mean
SETTLED = 10  # forwards that gains read from a file count as
WINDOW_RATE = 0.03
NUM_MATCH_KINDS = max(MATCH_KINDS) + 1


class Prior(NamedTuple):
    """Weights to start with: as they came out on prompts of eight tasks, rounded.

    Attributes:
        lone_matches: of what followed in this text where no logits are recycled, by the kind of match.
        matches: the same beside recycled logits.
        pooled: of what followed in earlier texts.
        recycled: of the logits under the longest to the shortest key, by the longest key that was found.
        common: of the text's commonest tokens; where a draft was asked.
        bias: by the longest key; where a draft was asked.
        draft: of the draft, by the longest key.
        drafted_share: of the weights of matches and logits, where a draft was asked.
    """

    lone_matches: tuple[float, ...]
    matches: tuple[float, ...]
    pooled: float
    recycled: tuple[tuple[float, float, float], ...]
    common: tuple[float, float]
    bias: tuple[tuple[float, ...], tuple[float, ...]]
    draft: tuple[float, ...]
    drafted_share: float

    def weights(self) -> list[tuple[float, ...]]:
        """Bias and weights of each kind of context, see `AdaptiveWeights.kind`."""
        found: list[tuple[float, ...]] = []
        for is_drafted in (False, True):
            share = self.drafted_share if is_drafted else 1.0
            for match in range(NUM_MATCH_KINDS):
                for level in range(MAX_KEY + 1):
                    of_match = (self.matches if level else self.lone_matches)[match]
                    of_draft = self.draft[level] if is_drafted else 0.0
                    shared = [share * weight for weight in (of_match, self.pooled, *self.recycled[level])]
                    bias, common = self.bias[is_drafted][level], self.common[is_drafted]
                    found.append((bias, *shared, common, of_draft, FOUND_WEIGHT))
        return found


FOUND_WEIGHT = 0.2  # of what a window found
GREEDY = Prior(
    lone_matches=(0.0, 0.35, 0.5, 0.6, 0.65, 0.7),  # by recorded answers of a model of 7B parameters
    matches=(0.0, 0.15, 0.22, 0.3, 0.3, 0.25),
    pooled=0.27,
    recycled=((0.0, 0.0, 0.0), (0.0, 0.0, 0.5), (0.0, 0.45, 0.25), (0.5, 0.15, 0.1)),
    common=(0.5, 0.12),
    bias=((-6.2, -3.7, -3.3, -3.1), (-6.5, -5.0, -3.4, -3.0)),
    draft=(1.6, 1.1, 0.95, 0.8),
    drafted_share=0.6,
)
SAMPLED = Prior(
    lone_matches=(0.0, 0.15, 0.2, 0.2, 0.33, 0.6),
    matches=(0.0, 0.15, 0.2, 0.2, 0.33, 0.6),
    pooled=0.14,
    recycled=((0.0, 0.0, 0.0), (0.0, 0.0, 0.7), (0.0, 0.55, 0.35), (0.55, 0.2, 0.2)),
    common=(0.45, 0.0),
    bias=((-6.6, -5.7, -5.5, -5.5), (-6.4, -6.1, -5.8, -4.9)),
    draft=(0.94, 0.81, 0.76, 0.66),
    drafted_share=0.3,
)


@dataclass(slots=True)
class AdaptiveWeights:
    """What was learned about the sources, apart for greedy and for sampled texts.

    Attributes:
        gains (`list[float]`): tokens that a draft model's first, second, ... forward of a step and those after it add,
            less the cost of those after it.
        num_gains (`list[int]`): forwards that each of `gains` was learned from, where it was not read from a file.
        retry_credit (`float`): tokens that forwards which do not pay may lose.
        window_gain (`float`): tokens a step that are drafted and accepted because of lookahead's window.
    """

    INITIAL_WINDOW_GAIN: ClassVar[float] = 0.05  # of a window that nobody has tried

    mixer: Mixer = field(default_factory=lambda: Mixer(GREEDY.weights()))
    calibration: Calibration = field(default_factory=Calibration)
    gains: list[float] = field(default_factory=list)
    num_gains: list[int] = field(default_factory=list)
    retry_credit: float = 0.0
    window_gain: float = INITIAL_WINDOW_GAIN

    @classmethod
    def of_sampled(cls) -> "AdaptiveWeights":
        """Those that sampled texts begin with."""
        return cls(mixer=Mixer(SAMPLED.weights()))

    def gain(self, number: int) -> float:
        """What the draft model's forward `number`, counted from 0, may add; hopeful of the first that nobody tried."""
        if number > len(self.gains):
            return 0.0
        return self.gains[number] if number < len(self.gains) else INITIAL_GAIN

    def gained(self, number: int, tokens: float) -> None:
        """The forward `number` and those after it added so many tokens, less the cost of those after it."""
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
