"""DFlash's parameters."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.draft_model.head_config import HeadConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A head drafts a block of tokens in one forward from the target's hidden states, the target verifies.

    Sources: https://arxiv.org/abs/2602.06036 (DFlash), https://arxiv.org/abs/2607.05147 (DSpark).

    Args:
        draft_len (`int`, *optional*, defaults to `15`):
            Most tokens drafted along one branch, and never more than a block of the head holds: `block_size - 1`, or
            `block_size` for heads that draft from the text's last token too, as DSpark heads do by default. Aliases:
            `max_draft_len`, `num_assistant_tokens`.
        draft_model_device_list (`list[int | str]`, *optional*):
            Device of the head: the first of the list. `None` puts it where the target reads its inputs.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target model.
        use_logits (`bool`, *optional*, defaults to `False`):
            How sampling accepts drafted tokens, as for `spec_method="draft_model"`.
        num_branches (`int`, *optional*, defaults to `1`):
            Most children of a node of the draft tree; 1 drafts a chain. With DFlash heads the tokens of a block are
            predicted independently of one another, so all branches of a tree offer the same tokens at each depth. With
            DSpark and DFlash 2 heads each node has children of its own.
        max_nodes (`int`, *optional*):
            Drafted tokens that are verified a step at most, all branches together. `None` verifies as many as are worth
            what they add to the target's forward, at most `draft_len` of a chain and
            `min(draft_len * num_branches, 16)` of a tree; with a `confidence_threshold` all that are drafted.
        confidence_threshold (`float`, *optional*):
            Drafting goes on after a token only if it was given at least this probability; `0.0` always drafts
            `draft_len` tokens. `None` or `"auto"` learns how far drafting saves time. Alias:
            `assistant_confidence_threshold`.
    """

    draft_len: int = 15
    num_branches: int = 1

    vllm_method: ClassVar[str] = "dflash"
    tensorrt_type: ClassVar[str] = "DFlash"
    needs_file: ClassVar[bool] = True
