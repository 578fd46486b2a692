"""Settings of a race, checked, and prompts that show where speculation shines."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.config import check_at_least, check_positive, check_temperature

METHOD_LABELS = {  # of the rows of `bench` that can race
    "auto": "Auto",
    "prompt_lookup": "Prompt lookup",
    "lookahead": "Lookahead",
    "draft_model": "Draft model",
    "auto+draft_model": "Auto + draft model",
    "head": "Draft head",
    "auto+head": "Auto + draft head",
}
MAX_METHODS = 3
NUM_TOKENS = 96
MAX_TEMPERATURE, MAX_SEED = 2.0, 2**31 - 1
IN_RANGE = "Choose a value in this range."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one visitor.

    Attributes:
        max_new_tokens (`int`): most tokens of one lane.
        max_prompt_tokens (`int`): longest prompt.
        max_prompt_chars (`int`): longest prompt in characters.
        max_seconds (`float`): longest race, all lanes together; what was written by then is shown.
        queue_size (`int`): most visitors that wait.
    """

    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    max_prompt_chars: int = 8192
    max_seconds: float = 120.0
    queue_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "max_prompt_chars", "queue_size"):
            check_positive(name, getattr(self, name), "Leave it out for the default.")
        if not self.max_seconds > 0:
            raise ConfigError("max_seconds", "must be above 0", self.max_seconds, "Leave it out for the default.")

    @property
    def usual_tokens(self) -> int:
        """Tokens of a lane by default."""
        return min(NUM_TOKENS, self.max_new_tokens)


LABELS = {  # of fields, for errors
    "prompt": "Prompt",
    "methods": "Methods",
    "temperature": "Temperature",
    "seed": "Seed",
    "max_new_tokens": "New tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one race.

    Attributes:
        prompt (`str`): the text to continue.
        methods (`tuple[str, ...]`): what races, one to three of `METHOD_LABELS`.
        max_new_tokens (`int`): tokens of each lane.
        temperature (`float`): 0 is greedy.
        seed (`int`): of sampling.

    Raises:
        ConfigError: a value out of its range, or an unknown name.
    """

    prompt: str
    methods: tuple[str, ...] = ("auto",)
    max_new_tokens: int = NUM_TOKENS
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt:
            raise ConfigError("prompt", "must hold some text", self.prompt, "Type a prompt, or choose an example.")
        if not 0 < len(set(self.methods)) == len(self.methods) <= MAX_METHODS:
            labels = [METHOD_LABELS.get(method, method) for method in self.methods]
            raise ConfigError("methods", f"must be 1 to {MAX_METHODS} different ones", labels, "Choose what races.")
        for method in self.methods:
            if method not in METHOD_LABELS:
                raise unknown_name("methods", method, METHOD_LABELS)
        if self.temperature != 0:
            check_temperature("temperature", self.temperature, "0 takes the likeliest token each time.")
        if self.temperature > MAX_TEMPERATURE:
            raise ConfigError("temperature", f"must be at most {MAX_TEMPERATURE:g}", self.temperature, IN_RANGE)
        check_at_least("seed", self.seed, 0, IN_RANGE, most=MAX_SEED)
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE)

    def check_within(self, limits: Limits, methods: Collection[str]) -> None:
        """Raise unless a page allows the race.

        Args:
            methods: those that can race on its model.

        Raises:
            ConfigError: too many tokens, too long a prompt, or another method.
        """
        if len(self.prompt) > limits.max_prompt_chars:
            rule = f"must have at most {limits.max_prompt_chars} characters"
            raise ConfigError("prompt", rule, f"{len(self.prompt)} characters", "Shorten it.")
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE, most=limits.max_new_tokens)
        if missing := [METHOD_LABELS[method] for method in self.methods if method not in methods]:
            rule = f"must be among {', '.join([METHOD_LABELS[name] for name in methods])} on this page"
            raise ConfigError("methods", rule, missing[0], "Drafts need the option --assistant-model.")


def config_of(method: str) -> dict[str, Any] | None:
    """`spec_config` of a method: its defaults, but no draft from the text of another call."""
    return {"pool": "request"} if method.partition("+")[0] in ("auto", "prompt_lookup") else None


EXAMPLES = json.loads((Path(__file__).parent / "assets" / "gallery.json").read_text("utf-8"))
GALLERY, CHAT_GALLERY = EXAMPLES["code"], EXAMPLES["chat"]  # each with name, prompt, and what it shows
