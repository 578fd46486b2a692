"""Parameters of drafting with a checkpoint's own MTP layers."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.draft_model.head_config import HeadConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(HeadConfig):
    """The multi-token prediction layers of the target's checkpoint draft, the target verifies.

    Source: https://arxiv.org/abs/2412.19437 (DeepSeek-V3, section 2.2).

    Args:
        draft_len (`int`, *optional*, defaults to `4`):
            Most tokens drafted along one branch. The first MTP layer drafts the first token, the second the next, and
            the last one all that follow. Aliases: `max_draft_len`, `num_assistant_tokens`.
        draft_model_device_list (`list[int | str]`, *optional*):
            Device of the MTP layers: the first of the list. `None` puts them where the target reads its inputs.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target model.
        use_logits (`bool`, *optional*, defaults to `False`):
            How sampling accepts drafted tokens, as for `spec_method="draft_model"`.
        num_branches (`int`, *optional*, defaults to `1`):
            Most children of a node of the draft tree; 1 drafts a chain.
        max_nodes (`int`, *optional*):
            Drafted tokens that are verified a step at most, all branches together. `None` verifies as many as are worth
            what they add to the target's forward, at most `draft_len` of a chain and
            `min(draft_len * num_branches, 16)` of a tree; with a `confidence_threshold` all that are drafted.
        confidence_threshold (`float`, *optional*):
            Drafting goes on after a token only if it was given at least this probability; `0.0` always drafts
            `draft_len` tokens. `None` or `"auto"` learns how far drafting saves time. Alias:
            `assistant_confidence_threshold`.
    """

    draft_len: int = 4
    num_branches: int = 1

    vllm_method: ClassVar[str] = "mtp"
    tensorrt_type: ClassVar[str] = "MTP"
    needs_file: ClassVar[bool] = False
