"""Lookahead's parameters: the window, the n-grams and how many of them are verified.

LookaheadConfig(window_size=7, ngram_size=5, verification_set_size=7)
LookaheadConfig.parse([7, 5, 7])
LookaheadConfig.parse([5, 5, 5]).check_within(LookaheadConfig.parse([7, 5, 7]))
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import (
    MAX_NGRAM_SIZE,
    MAX_STEP_TOKENS,
    SpecConfig,
    check_at_least,
    check_positive,
)

SMALLER = "Usual are 7, 5 and 7."
PLAIN = "Plain decoding is window_size=1, ngram_size=1, verification_set_size=0; else all three start at (1, 2, 1)."


def max_draft_len(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """Most tokens that a step of lookahead computes besides the current one, window and candidates together.

    TensorRT-LLM's formula: `max_draft_len(7, 7, 7)` is 83, and plain decoding, `(1, 1, 0)`, needs none.

    Raises:
        ConfigError: a size that is no whole number, or below that of plain decoding.
    """
    check_at_least("window_size", window_size, 1, "Usual values are 3 to 15.")
    check_at_least("ngram_size", ngram_size, 1, "Usual values are 3 to 15.")
    check_at_least("verification_set_size", verification_set_size, 0, "Usual values are 3 to 15.")
    return max(ngram_size - 2, 0) + (window_size - 1 + verification_set_size) * (ngram_size - 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig(SpecConfig):
    """Lookahead decoding: collect n-grams from a window of guesses about the text to come, verify those that fit.

    Source: https://arxiv.org/abs/2402.02057; parameters and list form of TensorRT-LLM. `(1, 1, 0)` is plain decoding;
    the smallest setting that TensorRT-LLM calls meaningful is `(2, 2, 1)`.

    Args:
        window_size (`int`, *optional*, defaults to `7`):
            Columns W of the window: n-grams collected a step. Aliases: `windows_size`, `max_window_size`.
        ngram_size (`int`, *optional*, defaults to `5`):
            Tokens N of an n-gram; a step emits at most N tokens. Alias: `max_ngram_size`.
        verification_set_size (`int`, *optional*, defaults to `7`):
            Most n-grams G that are verified a step, and that the pool keeps for one first token; the least recently
            used leaves first. Alias: `max_verification_set_size`.
    """

    window_size: int = 7
    ngram_size: int = 5
    verification_set_size: int = 7

    aliases: ClassVar[Mapping[str, str]] = {
        "windows_size": "window_size",
        "max_window_size": "window_size",
        "max_ngram_size": "ngram_size",
        "max_verification_set_size": "verification_set_size",
    }
    list_form: ClassVar[tuple[str, ...]] = ("window_size", "ngram_size", "verification_set_size")
    min_list_entries: ClassVar[int] = 3  # the sizes go together

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        check_positive("window_size", self.window_size, "Usual values are 5 to 15.", most=MAX_STEP_TOKENS)
        check_positive("ngram_size", self.ngram_size, "Usual values are 3 to 7.", most=MAX_NGRAM_SIZE)
        if self.ngram_size == 1:
            if self.window_size != 1:
                raise ConfigError("window_size", "must be 1 where `ngram_size` is 1", self.window_size, PLAIN)
            if type(self.verification_set_size) is not int or self.verification_set_size != 0:
                rule = "must be 0 where `ngram_size` is 1"
                raise ConfigError("verification_set_size", rule, self.verification_set_size, PLAIN)
        else:
            check_positive("verification_set_size", self.verification_set_size, PLAIN, most=MAX_STEP_TOKENS)
            if self.max_draft_len > MAX_STEP_TOKENS:
                rule = f"must leave at most {MAX_STEP_TOKENS} tokens a step, (W - 1 + G) * (N - 1) + N - 2"
                raise ConfigError("window_size, ngram_size, verification_set_size", rule, self.max_draft_len, SMALLER)

    @property
    def is_plain(self) -> bool:
        """True if nothing is drafted, as with `(1, 1, 0)`."""
        return self.ngram_size == 1

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, G candidates of N - 1 tokens; the window is not counted."""
        return self.verification_set_size * (self.ngram_size - 1)

    @property
    def max_draft_len(self) -> int:
        """Most tokens a step computes besides the current one, see the function of this name."""
        return max_draft_len(self.window_size, self.ngram_size, self.verification_set_size)

    @property
    def step_budget(self) -> int:
        """Most tokens a step computes besides the current one, the window's counted."""
        return self.max_draft_len

    def to_tensorrt_llm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """`LookaheadDecodingConfig`, which fills its pool from the prompt as well."""
        self.check_carried("TensorRT-LLM", *self.list_form)
        return {
            "decoding_type": "Lookahead",
            "max_window_size": self.window_size,
            "max_ngram_size": self.ngram_size,
            "max_verification_set_size": self.verification_set_size,
        }

    def check_within(self, reserved: Self, field: str = "spec_config") -> None:
        """Raise unless this configuration, a request's, fits within the one `reserved` for the model.

        Raises:
            ConfigError: one of the three sizes exceeds the reserved one; the error names it under `field`.
        """
        for name in self.list_form:
            size, limit = getattr(self, name), getattr(reserved, name)
            if size > limit:
                raise ConfigError(
                    f"{field}.{name}",
                    f"must be at most {limit}, as reserved for the model",
                    size,
                    "Ask for less in this call, or reserve more.",
                )
