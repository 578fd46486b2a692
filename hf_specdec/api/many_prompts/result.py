"""Results of `generate_many`."""

from dataclasses import dataclass
from typing import Any

from hf_specdec.common.stats import SpecStats


@dataclass(frozen=True, slots=True)
class ManyResult:
    """Result of one prompt.

    Attributes:
        index (`int`): the prompt's place among the prompts, from 0.
        prompt: the prompt as it was given.
        token_ids (`list[int]`): the new tokens; those made before an error, if there was one.
        text (`str | None`): the new tokens decoded, special ones left out; `None` without a tokenizer.
        seed (`int | None`): when sampling: plain `generate` of this prompt alone gives the same tokens after
            `torch.manual_seed(seed)`.
        error (`Exception | None`): why the prompt failed; the others go on.
        stats (`SpecStats`): this prompt's counters.
    """

    index: int
    prompt: Any
    token_ids: list[int]
    text: str | None
    seed: int | None
    error: Exception | None
    stats: SpecStats
