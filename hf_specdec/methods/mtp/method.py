"""Parameters of MTP layers, and the registry's entry."""

import dataclasses
from functools import partial
from typing import ClassVar

from hf_specdec.methods.common.entry import HeadKind, Method, Source
from hf_specdec.methods.draft_model.config import HeadConfig
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.mtp.network import MtpHead


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(HeadConfig):
    """The multi-token prediction layers of the target's checkpoint draft, the target verifies.

    Source: https://arxiv.org/abs/2412.19437 (DeepSeek-V3, section 2.2).

    Further arguments are those of `DraftModelConfig`.

    Args:
        draft_len (`int`, *optional*, defaults to `4`):
            Most tokens drafted along one branch. The first MTP layer drafts the first token, the second the next, and
            the last one all that follow. Aliases: `max_draft_len`, `num_assistant_tokens`.
    """

    draft_len: int = 4

    vllm_method: ClassVar[str] = "mtp"
    tensorrt_type: ClassVar[str] = "MTP"
    needs_file: ClassVar[bool] = False


METHOD = Method(
    name="mtp",
    config_class=MtpConfig,
    config_arguments=("mtp_config",),
    summary="drafts with the multi-token prediction layers of the target's checkpoint",
    make=partial(drafter_of, "mtp"),
    takes_draft_head=True,
    head=HeadKind(of_target=MtpHead.of_checkpoint),
    sources=(Source("mtp", "MTP layers", "written by the model's own layers for several tokens"),),
)
