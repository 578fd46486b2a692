"""Parameters that all draft heads have."""

import dataclasses
from typing import ClassVar

from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_model.config import DraftModelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DraftModelConfig):
    """Base class of the heads' configurations: the fields of a draft model's, without its list form.

    Args:
        draft_model_device_list (`list[int | str]`, *optional*):
            Device of the head: the first of the list. `None` puts it where the target reads its inputs.
        max_nodes (`int`, *optional*):
            Drafted tokens that are verified a step at most, all branches together. `None` verifies as many as are worth
            what they add to the target's forward, at most `draft_len` of a chain and
            `min(draft_len * num_branches, 16)` of a tree; with a `confidence_threshold` all that are drafted.
    """

    list_form: ClassVar[tuple[str, ...]] = ()
    tree_nodes: ClassVar[int] = 16

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if self.engine != "loop":
            rule, remedy = 'must be "loop" with a draft head', "Leave it out: transformers' loop drafts without it."
            raise ConfigError("engine", rule, self.engine, remedy)
