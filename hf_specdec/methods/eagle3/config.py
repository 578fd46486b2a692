"""EAGLE-3's parameters."""

import dataclasses
from typing import ClassVar

from hf_specdec.methods.draft_model.head_config import HeadConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """A head on the target's own hidden states drafts, the target verifies.

    Sources: https://arxiv.org/abs/2503.01840 (EAGLE-3), https://arxiv.org/abs/2406.16858 (EAGLE-2: the tree grows
    below its most probable nodes, and the most probable ones of all are verified).

    Args:
        draft_len (`int`, *optional*, defaults to `6`):
            Most tokens drafted along one branch, and most forwards of the head a step. Aliases: `max_draft_len`,
            `num_assistant_tokens`.
        draft_model_device_list (`list[int | str]`, *optional*):
            Device of the head: the first of the list. `None` puts it where the target reads its inputs.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target model.
        use_logits (`bool`, *optional*, defaults to `False`):
            How sampling accepts drafted tokens, as for `spec_method="draft_model"`: `False` compares them with the
            target's own draws, so a seed gives the text of plain `generate`; `True` draws drafts from the head's
            distribution and accepts them by the ratio of the probabilities.
        num_branches (`int`, *optional*, defaults to `4`):
            Most children of a node of the draft tree; 1 drafts a chain.
        max_nodes (`int`, *optional*):
            Drafted tokens that are verified a step at most, all branches together. `None` verifies as many as are worth
            what they add to the target's forward, at most `draft_len` of a chain and
            `min(draft_len * num_branches, 16)` of a tree; with a `confidence_threshold` all that are drafted.
        confidence_threshold (`float`, *optional*):
            The head goes on after a token only if it gave that token at least this probability; `0.0` always drafts
            `draft_len` tokens. `None` or `"auto"` learns how far drafting saves time. Alias:
            `assistant_confidence_threshold`.
    """

    draft_len: int = 6
    num_branches: int = 4

    vllm_method: ClassVar[str] = "eagle3"
    tensorrt_type: ClassVar[str] = "Eagle3"
    needs_file: ClassVar[bool] = True
