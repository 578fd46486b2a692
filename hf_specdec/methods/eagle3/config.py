"""EAGLE-3's parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hf_specdec.errors import ConfigError
from hf_specdec.methods.config import SpecConfig
from hf_specdec.methods.draft_model.config import DraftModelConfig

__all__ = ["Eagle3Config"]

TREE_NODES = 16  # default node budget of a tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftModelConfig):
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
            Most drafted tokens a step, all branches together. Defaults to `draft_len` for a chain and to
            `min(draft_len * num_branches, 16)` for a tree.
        confidence_threshold (`float`, *optional*):
            The head goes on after a token only if it gave that token at least this probability; `0.0` always drafts
            `draft_len` tokens. `None` or `"auto"` learns when going on pays. Alias: `assistant_confidence_threshold`.
    """

    draft_len: int = 6
    num_branches: int = 4

    aliases: ClassVar[Mapping[str, str]] = DraftModelConfig.aliases
    list_form: ClassVar[tuple[str, ...]] = ()
    device_fields: ClassVar[Mapping[str, str]] = DraftModelConfig.device_fields

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if self.engine != "loop":
            rule, remedy = 'must be "loop" with a draft head', "transformers' assisted decoding knows no such heads."
            raise ConfigError("engine", rule, self.engine, remedy)

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        if self.max_nodes is not None or self.num_branches == 1:
            return DraftModelConfig.node_budget.fget(self)  # type: ignore[attr-defined, no-any-return]
        return min(self.draft_len * self.num_branches, TREE_NODES)

    def to_vllm(self, *, draft_model: str | None = None) -> dict[str, Any]:
        """`method="eagle3"`; vLLM drafts chains, so `num_branches` must be 1."""
        if self.num_branches != 1:
            raise ConfigError("num_branches", "must be 1 for vLLM, which drafts chains", self.num_branches, "Use 1.")
        found = DraftModelConfig.to_vllm(dataclasses.replace(self, num_branches=4), draft_model=draft_model)
        return {**found, "method": "eagle3"}

    def to_tensorrt_llm(self, *, draft_model: str | None = None) -> dict[str, Any]:
        """Has no equivalent that is known here."""
        return SpecConfig.to_tensorrt_llm(self, draft_model=draft_model)
