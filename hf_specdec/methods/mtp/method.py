"""The registry's entry of MTP layers."""

from functools import partial

from hf_specdec.methods.common.method import Method
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.mtp.config import MtpConfig
from hf_specdec.methods.mtp.network import MtpHead, mtp_head_of

MTP = Method(
    name="mtp",
    config_class=MtpConfig,
    config_arguments=("mtp_config",),
    summary="drafts with the multi-token prediction layers of the target's checkpoint",
    make=partial(drafter_of, "mtp"),
    takes_draft_head=True,
    own_head=MtpHead.of_checkpoint,
    as_head=mtp_head_of,
)
