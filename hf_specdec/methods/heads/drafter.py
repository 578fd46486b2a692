"""The drafter of every head: EAGLE-2's dynamic tree, grown as a draft model's is."""

from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.heads.config import HeadConfig
from hf_specdec.methods.method import DrafterContext

__all__ = ["head_drafter"]


def head_drafter(name: str, config: HeadConfig, context: DrafterContext) -> DraftModelDrafter:
    """A drafter that asks the call's head.

    Args:
        name: of the method; acceptances are counted apart for each method, number of branches and size of head.
    """
    scorer = context.scorer
    assert scorer is not None
    key = f"{name}, {config.num_branches} branches, {scorer.relative_cost:.6f}"
    return DraftModelDrafter(
        config,
        scorer,
        logits_processor=context.logits_processor,
        generator=context.generator,
        memory=context.state.of(key, AcceptanceCounts),
    )
