"""The registry's entry of MTP layers."""

from hf_specdec.methods.base import Drafter
from hf_specdec.methods.heads.drafter import head_drafter
from hf_specdec.methods.method import DrafterContext, Method
from hf_specdec.methods.mtp.config import MtpConfig
from hf_specdec.methods.mtp.network import MtpHead, mtp_head_of

__all__ = ["MTP"]


def _make(config: MtpConfig, context: DrafterContext) -> Drafter:
    return head_drafter(MTP.name, config, context)


MTP = Method(
    name="mtp",
    config_class=MtpConfig,
    config_arguments=("mtp_config",),
    summary="drafts with the multi-token prediction layers of the target's checkpoint",
    make=_make,
    takes_draft_head=True,
    own_head=MtpHead.of_checkpoint,
    as_head=mtp_head_of,
)
