"""Auto's parameters."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, get_args

import torch

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import (
    MAX_STEP_TOKENS,
    Pool,
    SpecConfig,
    check_choice,
    check_devices,
    check_positive,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutoSpecConfig(SpecConfig):
    """Auto: all training-free sources in one predictor, a draft model when given, and as many nodes as save time.

    Args:
        max_nodes (`int`, *optional*, defaults to `64`):
            Most drafted tokens a step, where `num_nodes` is not given.
        num_nodes (`int`, *optional*):
            Draft this many tokens every step, whatever they cost; fewer only where no more have a chance of one in a
            thousand. It takes the place of `max_nodes`. `None` drafts as many as save time, or none.
        pool (`str`, *optional*, defaults to `"shared"`):
            `"shared"` remembers texts, logits and what was learned for later calls on this model; `"request"` keeps
            nothing after a call. A `SpecMemory` that `enable` is given has its bounds.
        draft_len (`int`, *optional*, defaults to `6`):
            Most forwards of the draft model a step, where `assistant_model` is given; fewer where they save no time.
        deterministic (`bool`, *optional*):
            Whether the same call drafts the same tokens each time: sizes follow from what is assumed of the device,
            never from the clock, and nothing is remembered from call to call. `None` is `True` where
            `torch.use_deterministic_algorithms` is on.
        draft_model_device_list (`list[int | str]`, *optional*):
            Devices of the draft model, as for `spec_method="draft_model"`.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target.
    """

    max_nodes: int = 64
    num_nodes: int | None = None
    pool: Pool = "shared"
    draft_len: int = 6
    deterministic: bool | None = None
    draft_model_device_list: Sequence[int | str] | None = None
    target_model_device_list: Sequence[int | str] | None = None

    device_fields: ClassVar[Mapping[str, str]] = {
        "target": "target_model_device_list",
        "draft": "draft_model_device_list",
    }

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        check_positive("max_nodes", self.max_nodes, "The default is 64.", most=MAX_STEP_TOKENS)
        if self.num_nodes is not None:
            check_positive("num_nodes", self.num_nodes, "Use `None` for as many as save time.", most=MAX_STEP_TOKENS)
        check_choice("pool", self.pool, get_args(Pool))
        check_positive("draft_len", self.draft_len, "Usual values are 2 to 8.", most=MAX_STEP_TOKENS)
        if self.deterministic is not None and not isinstance(self.deterministic, bool):
            remedy = "Leave it out to follow torch.use_deterministic_algorithms."
            raise ConfigError("deterministic", "must be True, False or None", self.deterministic, remedy)
        check_devices("draft_model_device_list", self.draft_model_device_list)
        check_devices("target_model_device_list", self.target_model_device_list)

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        return self.max_nodes if self.num_nodes is None else self.num_nodes

    @property
    def fits_costs(self) -> bool:
        """True if each step drafts as many tokens as pay, by what the target's forwards cost."""
        return self.num_nodes is None

    @property
    def is_deterministic(self) -> bool:
        """True if what is drafted follows from the call alone."""
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic
