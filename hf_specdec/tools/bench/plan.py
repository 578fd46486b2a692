"""Plan of a run: its settings, and its visits in their order. Knows nothing about models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_positive, check_temperature
from hf_specdec.tools.bench.prompts import Prompt

WATCHED_ROUND = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a measurement.

    Args:
        max_new_tokens (`int`, *optional*, defaults to `128`): most new tokens of a call.
        rounds (`int`, *optional*, defaults to `3`): timed rounds, after one that warms up and counts drafts.
        modes (`tuple[str, ...]`, *optional*): `"greedy"`, `"sampled"` or both; both by default.
        temperature (`float`, *optional*, defaults to `0.7`): of the sampled mode; `None` leaves transformers' own.
        top_p (`float`, *optional*): of the sampled mode; `None` leaves transformers' own.
        top_k (`int`, *optional*): likewise.
        seed (`int`, *optional*, defaults to `0`): of the sampled mode; round r draws from `seed + r`, each row
            the same.
    """

    max_new_tokens: int = 128
    rounds: int = 3
    modes: tuple[str, ...] = ("greedy", "sampled")
    temperature: float | None = 0.7
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("max_new_tokens", self.max_new_tokens, "Usual values are 64 to 512.")
        check_positive("rounds", self.rounds, "Three give a spread.")
        if not self.modes or not set(self.modes) <= {"greedy", "sampled"}:
            raise ConfigError("modes", 'must be "greedy", "sampled" or both', self.modes, "Leave it out for both.")
        check_temperature("temperature", self.temperature, 'Use the mode "greedy".')

    def options(self, mode: str) -> dict[str, Any]:
        """Arguments of `generate` for a mode."""
        if mode == "greedy":
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        sampling = {name: value for name, value in given.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True, **sampling}


@dataclass(frozen=True, slots=True)
class Visit:
    """All rows on one turn of one prompt in one round; the unit that is measured or not."""

    mode: str
    round: int
    prompt: Prompt
    turn: int

    @property
    def key(self) -> dict[str, Any]:
        """First fields of its records."""
        task = self.prompt.task
        return {"mode": self.mode, "round": self.round, "prompt": self.prompt.id, "task": task, "turn": self.turn}

    def __str__(self) -> str:
        name = "warm-up round" if self.round == WATCHED_ROUND else f"round {self.round + 1}"
        return f"{self.mode}, {name}, {self.prompt.id}"


def visits(settings: BenchSettings, prompts: Sequence[Prompt]) -> Iterator[Visit]:
    """Mode by mode, the watched round before the timed ones, all prompts in each."""
    for mode in settings.modes:
        for number in range(WATCHED_ROUND, settings.rounds):
            for prompt in prompts:
                for turn in range(len(prompt.turns)):
                    yield Visit(mode, number, prompt, turn)
