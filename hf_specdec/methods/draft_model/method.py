"""The registry's entry of draft models, and the drafter that heads share with them."""

from functools import partial

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, Source
from hf_specdec.methods.draft_model.candidates import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from hf_specdec.methods.draft_model.translated import TranslatedDrafter


def drafter_of(name: str, config: DraftModelConfig, context: DrafterContext) -> BaseDrafter:
    """A drafter that asks the call's draft model or head.

    Args:
        name: of the method. Acceptances are counted apart by it, by branches, by the size of the draft and by whether
            tokens are sampled: other drafts are accepted more or less often.
    """
    scorer = context.scorer
    assert scorer is not None
    name = f"{name}, {config.num_branches} branches, {scorer.relative_cost:.6f}"
    if context.is_sampled:
        name += ", sampled"
    if context.translation is not None:
        if config.num_branches > 1:
            rule, remedy = "must be 1 with an assistant_tokenizer, which chains are translated for", "Leave it out."
            raise ConfigError("num_branches", rule, config.num_branches, remedy)
        counts = context.state.of(f"{name}, translated", AcceptanceCounts)
        return TranslatedDrafter(config, scorer, context.translation, counts=counts, token_cost=context.token_cost)
    return DraftModelDrafter(
        config,
        scorer,
        logits_processor=context.logits_processor,
        generator=context.generator,
        counts=context.state.of(name, AcceptanceCounts),
        token_cost=context.token_cost,
    )


METHOD = Method(
    name="draft_model",
    aliases=("draft_target",),
    config_class=DraftModelConfig,
    config_arguments=("draft_model_config", "draft_target_model_config"),
    summary="drafts with a smaller model of the same vocabulary",
    make=partial(drafter_of, "draft_model"),
    needs_draft_model=True,
    takes_draft_model=True,
    translates=True,
    sources=(Source("draft_model", "draft model", "written by the smaller model", "D", "draft_model"),),
)
