"""The registry's entry of DFlash."""

import dataclasses

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, HeadKind, Method, Source
from hf_specdec.methods.dflash.config import DFlashConfig
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.draft_model.method import drafter_of


def _make(config: DFlashConfig, context: DrafterContext) -> BaseDrafter:
    assert context.scorer is not None
    within = dataclasses.replace(config, draft_len=min(config.draft_len, context.scorer.max_draft_len))
    return drafter_of("dflash", within, context)


METHOD = Method(
    name="dflash",
    config_class=DFlashConfig,
    config_arguments=("dflash_config",),
    summary="drafts a block of tokens in one forward from the target's hidden states",
    make=_make,
    needs_draft_head=True,
    takes_draft_head=True,
    head=HeadKind(is_config=DFlashHeadConfig.describes, load=DFlashHead.read),
    sources=(Source("dflash", "DFlash head", "written by a model that fills in a block of tokens"),),
)
