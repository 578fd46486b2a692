"""The registry's entry of EAGLE-3 heads, and the acceptances that its calls have counted.

A head is asked as a draft model is: EAGLE-2's dynamic tree is that of `DraftModelDrafter`.
"""

from hf_specdec.methods.base import Drafter
from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.eagle3.config import Eagle3Config
from hf_specdec.methods.method import DrafterContext, Method

__all__ = ["EAGLE3"]


def _make(config: Eagle3Config, context: DrafterContext) -> Drafter:
    scorer = context.scorer
    assert scorer is not None
    name = f"{EAGLE3.name}, {config.num_branches} branches, {scorer.relative_cost:.6f}"
    return DraftModelDrafter(
        config,
        scorer,
        logits_processor=context.logits_processor,
        generator=context.generator,
        memory=context.state.of(name, AcceptanceCounts),
        source="head",
    )


EAGLE3 = Method(
    name="eagle3",
    aliases=("eagle",),
    config_class=Eagle3Config,
    config_arguments=("eagle3_config",),
    summary="drafts with a head that reads the target's hidden states",
    make=_make,
    needs_draft_head=True,
    takes_draft_head=True,
)
