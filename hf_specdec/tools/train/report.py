"""Results of a training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance of a draft's chains on held-out texts of one temperature.

    Attributes:
        temperature (`float`): at which the target wrote the texts.
        num_positions (`int`): where a chain was drafted.
        rates (`tuple[float, ...]`): share of the positions at which the first token, the first two, ... were the
            text's. The chains are of the likeliest tokens; drafts of sampled calls use the sampler's random numbers
            and are accepted more often as a rule.
    """

    temperature: float
    num_positions: int
    rates: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a verify step on the mean, the accepted ones and the target's own."""
        return 1.0 + sum(self.rates)


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One training, of a head or of a draft model.

    Attributes:
        num_steps (`int`): steps trained.
        best_step (`int`): the step whose weights were kept.
        minutes (`float`): of training, the writing of texts and the measurements left out.
        measured (`tuple[Measured, ...]`): held-out acceptance of the kept weights, by temperature.
        loss (`float`): mean of the last 50 steps, in nats; of a head, the draft steps' weighted sum.
    """

    num_steps: int
    best_step: int
    minutes: float
    measured: tuple[Measured, ...]
    loss: float
