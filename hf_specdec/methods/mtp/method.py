"""The registry's entry of MTP layers."""

from functools import partial

from hf_specdec.methods.common.entry import HeadKind, Method, Source
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.mtp.config import MtpConfig
from hf_specdec.methods.mtp.network import MtpHead, mtp_head_of

METHOD = Method(
    name="mtp",
    config_class=MtpConfig,
    config_arguments=("mtp_config",),
    summary="drafts with the multi-token prediction layers of the target's checkpoint",
    make=partial(drafter_of, "mtp"),
    takes_draft_head=True,
    head=HeadKind(wrap=mtp_head_of, of_target=MtpHead.of_checkpoint),
    sources=(Source("mtp", "MTP layers", "written by the model's own layers for several tokens"),),
)
