"""The registry's entry of EAGLE-3 heads."""

from hf_specdec.methods.base import Drafter
from hf_specdec.methods.eagle3.config import Eagle3Config
from hf_specdec.methods.heads.drafter import head_drafter
from hf_specdec.methods.method import DrafterContext, Method

__all__ = ["EAGLE3"]


def _make(config: Eagle3Config, context: DrafterContext) -> Drafter:
    return head_drafter(EAGLE3.name, config, context)


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
