"""Parameters of EAGLE-3 heads, and the registry's entry."""

import dataclasses
from functools import partial
from typing import ClassVar

from hf_specdec.methods.common.entry import HeadKind, Method, Source
from hf_specdec.methods.draft_model.config import HeadConfig
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.eagle3.network import Eagle3Head, Eagle3HeadConfig


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


METHOD = Method(
    name="eagle3",
    aliases=("eagle",),
    config_class=Eagle3Config,
    config_arguments=("eagle3_config",),
    summary="drafts with a head that reads the target's hidden states",
    make=partial(drafter_of, "eagle3"),
    needs_draft_head=True,
    takes_draft_head=True,
    head=HeadKind(is_config=Eagle3HeadConfig.describes, load=Eagle3Head.read),
    sources=(Source("eagle3", "EAGLE-3 head", "written by a head on the model's hidden states"),),
)
