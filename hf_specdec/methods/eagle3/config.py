"""EAGLE-3's parameters."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.draft_model.head_config import HeadConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """A head on the target's own hidden states drafts, the target verifies.

    Sources: https://arxiv.org/abs/2503.01840 (EAGLE-3), https://arxiv.org/abs/2406.16858 (EAGLE-2: the tree grows
    below its most probable nodes, and the most probable ones of all are verified).

    Further arguments are those of `DraftModelConfig`.

    Args:
        draft_len (`int`, *optional*, defaults to `6`):
            Most tokens drafted along one branch, and most forwards of the head a step. Aliases: `max_draft_len`,
            `num_assistant_tokens`.
    """

    draft_len: int = 6
    num_branches: int = 4

    vllm_method: ClassVar[str] = "eagle3"
    tensorrt_type: ClassVar[str] = "Eagle3"
