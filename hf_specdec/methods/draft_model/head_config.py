"""Parameters that all draft heads have."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_model.config import DraftModelConfig

TREE_NODES = 16  # default node budget of a tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DraftModelConfig):
    """Base class of the heads' configurations: the fields of a draft model's, without its list form.

    Attributes:
        vllm_method (`str`): what vLLM calls the method.
        tensorrt_type (`str`): the `decoding_type` of TensorRT-LLM's class for it.
        needs_file (`bool`): whether the head has a folder of its own.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        name: field for name, field in DraftModelConfig.aliases.items() if field != "exit_layer"
    }
    list_form: ClassVar[tuple[str, ...]] = ()
    transformers_arguments: ClassVar[Mapping[str, str]] = {
        name: field for name, field in DraftModelConfig.transformers_arguments.items() if field != "exit_layer"
    }
    vllm_method: ClassVar[str]
    tensorrt_type: ClassVar[str]
    needs_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if self.engine != "loop":
            rule, remedy = 'must be "loop" with a draft head', "Leave it out: transformers' loop drafts without it."
            raise ConfigError("engine", rule, self.engine, remedy)
        if self.exit_layer is not None:
            remedy = 'Use spec_method="draft_model" to draft with the target\'s first layers.'
            raise ConfigError("exit_layer", "must be unset with a draft head", self.exit_layer, remedy)

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        if self.max_nodes is not None:
            return self.max_nodes
        return self.draft_len if self.num_branches == 1 else min(self.draft_len * self.num_branches, TREE_NODES)

    def to_vllm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """vLLM's `speculative_config`; it drafts chains, so `num_branches` must be 1."""
        self._check_chain("vLLM", draft_model)
        devices = self.draft_model_device_list
        parallel = {} if devices is None else {"draft_tensor_parallel_size": len(devices)}
        named = {} if draft_model is None else {"model": os.fspath(draft_model)}
        return {"method": self.vllm_method, **named, "num_speculative_tokens": self.draft_len, **parallel}

    def to_tensorrt_llm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """`Eagle3DecodingConfig`, `MTPDecodingConfig` or `DFlashDecodingConfig`, which draft chains here."""
        self._check_chain("TensorRT-LLM", draft_model)
        named = {} if draft_model is None else {"speculative_model": os.fspath(draft_model)}
        return {"decoding_type": self.tensorrt_type, "max_draft_len": self.draft_len, **named}

    def _check_chain(self, project: str, draft_model: str | os.PathLike[str] | None) -> None:
        if self.num_branches != 1:
            rule = f"must be 1 for {project}, which is told of chains"
            raise ConfigError("num_branches", rule, self.num_branches, "Use 1.")
        if self.needs_file and draft_model is None:
            raise ConfigError("draft_model", f"must be given for {project}", None, "Name its folder or its hub name.")
        if draft_model is not None:
            check_path("draft_model", draft_model, "a folder or a name on the hub")
        fixed_length = ("confidence_threshold",) if self.confidence_threshold == 0.0 else ()
        placed = ("draft_model_device_list", "target_model_device_list")
        self.check_carried(project, "draft_len", "num_branches", *placed, *fixed_length)
