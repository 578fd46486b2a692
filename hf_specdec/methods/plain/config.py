"""The configuration of a loop that drafts nothing."""

import dataclasses

from hf_specdec.methods.common.config import SpecConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(SpecConfig):
    """The engine's loop with nothing drafted: one token a step. The baseline of this package's benchmarks."""
