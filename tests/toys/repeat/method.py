"""The toy method: configuration, drafter and entry."""

import dataclasses
from collections.abc import Sequence

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.config import SpecConfig, check_positive
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.entry import DrafterContext, Method, Source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepeatConfig(SpecConfig):
    """Repeat: draft the last token again and again.

    Args:
        num_times (`int`, *optional*, defaults to `3`): how often.
    """

    num_times: int = 3

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        check_positive("num_times", self.num_times, "Usual values are 1 to 3.")

    @property
    def node_budget(self) -> int:
        return self.num_times


class RepeatDrafter(BaseDrafter):
    def __init__(self, config: RepeatConfig) -> None:
        self.num_times, self.last = config.num_times, 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.last = prompt_ids[-1]

    def draft_for(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain(self.last, [self.last] * min(request.budget, self.num_times))

    def learn_from(self, result: DraftResult) -> None:
        self.last = result.accepted[-1]

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        return (DraftedNode("echo"),) * tree.num_draft_tokens


def _make(config: RepeatConfig, context: DrafterContext) -> BaseDrafter:
    return RepeatDrafter(config)


METHOD = Method(
    name="repeat",
    aliases=("stutter",),
    config_class=RepeatConfig,
    config_arguments=("repeat_config",),
    summary="drafts the last token again and again",
    make=_make,
    sources=(Source("echo", "echo", "the token before, once more", "E", "text"),),
)
