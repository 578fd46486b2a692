"""Parameters of DFlash heads, and the registry's entry."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, HeadKind, Method, Source
from hf_specdec.methods.dflash.network import DFlashHead, DFlashHeadConfig
from hf_specdec.methods.draft_model.config import HeadConfig
from hf_specdec.methods.draft_model.method import drafter_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A head drafts a block of tokens in one forward from the target's hidden states, the target verifies.

    Source: https://arxiv.org/abs/2602.06036.

    Further arguments are those of `DraftModelConfig`.

    Args:
        draft_len (`int`, *optional*, defaults to `15`):
            Most tokens drafted along one branch, and never more than a block of the head holds, `block_size - 1`.
            Aliases: `max_draft_len`, `num_assistant_tokens`.
        num_branches (`int`, *optional*, defaults to `1`):
            Most children of a node of the draft tree; 1 drafts a chain. The tokens of a block are predicted
            independently of one another, so all branches of a tree offer the same tokens at each depth.
    """

    draft_len: int = 15

    vllm_method: ClassVar[str] = "dflash"
    tensorrt_type: ClassVar[str] = "DFlash"


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
