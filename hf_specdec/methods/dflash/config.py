"""DFlash's parameters."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.draft_model.head_config import HeadConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A head drafts a block of tokens in one forward from the target's hidden states, the target verifies.

    Source: https://arxiv.org/abs/2602.06036.

    Further arguments are those of `DraftModelConfig`.

    Args:
        draft_len (`int`, *optional*, defaults to `15`):
            Most tokens drafted along one branch, and never more than a block of the head holds: `block_size - 1`, or
            `block_size` for heads that draft from the text's last token too. Aliases: `max_draft_len`,
            `num_assistant_tokens`.
        num_branches (`int`, *optional*, defaults to `1`):
            Most children of a node of the draft tree; 1 drafts a chain. With DFlash heads the tokens of a block are
            predicted independently of one another, so all branches of a tree offer the same tokens at each depth. With
            DFlash 2 heads each node has children of its own.
    """

    draft_len: int = 15

    vllm_method: ClassVar[str] = "dflash"
    tensorrt_type: ClassVar[str] = "DFlash"
