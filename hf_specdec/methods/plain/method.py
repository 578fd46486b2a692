"""A loop that drafts nothing: its configuration, its drafter, and the registry's entry."""

import dataclasses
from collections.abc import Sequence

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.entry import DrafterContext, Method


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(SpecConfig):
    """The engine's loop with nothing drafted: one token a step. The baseline of this package's benchmarks."""


class PlainDrafter(BaseDrafter):
    """Proposes the root alone."""

    never_drafts = True

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = prompt_ids[-1]

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """The last token of the text, nothing below it."""
        return DraftTree.chain(self._last)

    def learn_from(self, result: DraftResult) -> None:
        """Remember the last token."""
        self._last = result.accepted[-1]


def _make(config: PlainConfig, context: DrafterContext) -> BaseDrafter:
    return PlainDrafter()


METHOD = Method(
    name="plain",
    config_class=PlainConfig,
    summary="this package's loop with nothing drafted",
    make=_make,
)
