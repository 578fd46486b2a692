"""The registry's entry of draft models, and the acceptances that its calls have counted."""

from hf_specdec.methods.base import Drafter
from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.draft_model.translated import TranslatedDrafter
from hf_specdec.methods.method import DrafterContext, Method

__all__ = ["DRAFT_MODEL"]


def _make(config: DraftModelConfig, context: DrafterContext) -> Drafter:
    scorer = context.scorer
    assert scorer is not None
    # Drafts of another shape, or of a draft model of another size, are accepted more or less often.
    name = f"{DRAFT_MODEL.name}, {config.num_branches} branches, {scorer.relative_cost:.6f}"
    if context.translation is not None:
        memory = None if context.is_sampled else context.state.of(f"{name}, translated", AcceptanceCounts)
        return TranslatedDrafter(config, scorer, context.translation, memory=memory)
    return DraftModelDrafter(
        config,
        scorer,
        logits_processor=context.logits_processor,
        generator=context.generator,
        memory=context.state.of(name, AcceptanceCounts),
    )


DRAFT_MODEL = Method(
    name="draft_model",
    aliases=("draft_target",),
    config_class=DraftModelConfig,
    config_arguments=("draft_model_config", "draft_target_model_config"),
    summary="drafts with a smaller model of the same vocabulary",
    make=_make,
    needs_draft_model=True,
    takes_draft_model=True,
    translates=True,
)
