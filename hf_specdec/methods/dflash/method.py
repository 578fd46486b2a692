"""The registry's entry of DFlash."""

import dataclasses

from transformers import PreTrainedModel

from hf_specdec.methods.common.draft_head import BlockHead
from hf_specdec.methods.common.draft_scorer import BlockDraftScorer
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.method import DrafterContext, Method
from hf_specdec.methods.dflash.checkpoint import head_of_model
from hf_specdec.methods.dflash.config import DFlashConfig
from hf_specdec.methods.dflash.transformers_model import DFlashModelHead, is_dflash_config
from hf_specdec.methods.draft_model.method import drafter_of


def _make(config: DFlashConfig, context: DrafterContext) -> BaseDrafter:
    scorer = context.scorer
    assert isinstance(scorer, BlockDraftScorer)
    within = dataclasses.replace(config, draft_len=min(config.draft_len, scorer.max_draft_len))
    return drafter_of(DFLASH.name, within, context)


def _as_head(assistant: object) -> BlockHead | None:
    """A DFlash model of transformers or of the method's authors as a head; `None` for anything else."""
    if not isinstance(assistant, PreTrainedModel):
        return None
    return DFlashModelHead(assistant) if is_dflash_config(assistant.config) else head_of_model(assistant)


DFLASH = Method(
    name="dflash",
    config_class=DFlashConfig,
    config_arguments=("dflash_config",),
    summary="drafts a block of tokens in one forward from the target's hidden states",
    make=_make,
    needs_draft_head=True,
    takes_draft_head=True,
    as_head=_as_head,
)
