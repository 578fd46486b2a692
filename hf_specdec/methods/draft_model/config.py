"""Parameters of draft models, and of draft heads."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import MAX_STEP_TOKENS, SpecConfig, check_devices, check_flag, check_positive

TRANSLATED = 2  # tokens of the target that one of the draft's own vocabulary may become, on the mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(SpecConfig):
    """A smaller model drafts, the target verifies.

    Sources: https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318; parameters and list form of
    TensorRT-LLM's Draft-Target-Model.

    Args:
        draft_len (`int`, *optional*):
            Most tokens drafted along one branch, and most forwards of the draft a step. `None` begins with 4, and lets
            a chain that learns when to stop grow to 16 where all of it is accepted. Aliases: `max_draft_len`,
            `num_assistant_tokens`.
        draft_model_device_list (`list[int | str]`, *optional*):
            Devices of the draft model: numbers of GPUs, or names such as `"cpu"`. `generate` moves the model there if
            it is elsewhere; a device that is not there is an error. `None` leaves the model where it is.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target model, likewise.
        use_logits (`bool`, *optional*, defaults to `False`):
            How sampling accepts drafted tokens. `False` drafts the tokens that the random numbers of the target's next
            draws most likely choose and compares them with those draws, so a seed gives the text of plain `generate`.
            `True` draws drafts from the draft's distribution and accepts them by the ratio of the two models'
            probabilities: a chain brings a tenth more tokens per step, and texts have the target's distribution, yet
            are not the text that the seed gives without a draft; drafts are chains then, whatever `num_branches`.
            Greedy decoding is the same either way.
        num_branches (`int`, *optional*, defaults to `1`):
            Most children of a node of the draft tree; 1 drafts a chain.
        max_nodes (`int`, *optional*):
            Drafted tokens that are verified a step at most, all branches together. `None` verifies as many as are worth
            what they add to the target's forward, at most `draft_len` of a chain and
            `min(draft_len * num_branches, 32)` of a tree; with a `confidence_threshold` all that are drafted.
        confidence_threshold (`float`, *optional*):
            The draft goes on after a token only if it gave that token at least this probability, in sampled calls of
            being drawn; `0.0` always drafts `draft_len` tokens. `None` or `"auto"` learns how far drafting saves time,
            from how often tokens of such probability were accepted and from the two models' sizes. Alias:
            `assistant_confidence_threshold`.

    Attributes:
        first_len, longest (`int`): the `draft_len` that `None` begins with, and the most that it grows to.
        tree_nodes (`int`): default node budget of a tree, at most.
        vllm_method (`str`): what vLLM calls the method.
        tensorrt_type (`str`): the `decoding_type` of TensorRT-LLM's class for it.
        needs_file (`bool`): whether drafts need a folder of their own.
    """

    draft_len: int | None = None
    draft_model_device_list: Sequence[int | str] | None = None
    target_model_device_list: Sequence[int | str] | None = None
    use_logits: bool = False
    num_branches: int = 1
    max_nodes: int | None = None
    confidence_threshold: float | None = None

    aliases: ClassVar[Mapping[str, str]] = {
        "max_draft_len": "draft_len",
        "num_assistant_tokens": "draft_len",
        "assistant_confidence_threshold": "confidence_threshold",
    }
    list_form: ClassVar[tuple[str, ...]] = (
        "draft_len",
        "draft_model_device_list",
        "target_model_device_list",
        "use_logits",
    )
    device_fields: ClassVar[Mapping[str, str]] = {
        "target": "target_model_device_list",
        "draft": "draft_model_device_list",
    }
    first_len: ClassVar[int] = 4
    longest: ClassVar[int] = 16
    tree_nodes: ClassVar[int] = 32
    vllm_method: ClassVar[str] = "draft_model"
    tensorrt_type: ClassVar[str] = "Draft_Target"
    needs_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        if self.draft_len is not None:
            check_positive("draft_len", self.draft_len, "Usual values are 4 to 10.", most=MAX_STEP_TOKENS)
        check_devices("draft_model_device_list", self.draft_model_device_list)
        check_devices("target_model_device_list", self.target_model_device_list)
        check_flag("use_logits", self.use_logits, "True compares probabilities, False compares tokens.")
        check_positive("num_branches", self.num_branches, "Use 1 for a chain.", most=MAX_STEP_TOKENS)
        if self.max_nodes is not None:
            check_positive("max_nodes", self.max_nodes, "Use `None` for the default.", most=MAX_STEP_TOKENS)
        self._check_threshold(self.confidence_threshold)

    def _check_threshold(self, value: object) -> None:
        if isinstance(value, str) and value == "auto":
            object.__setattr__(self, "confidence_threshold", value := None)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            rule = 'must be a probability from 0.0 to 1.0, `None` or "auto"'
            remedy = "Use 0.0 to always draft `draft_len` tokens, `None` to learn when to stop."
            raise ConfigError("confidence_threshold", rule, value, remedy)

    @property
    def draws_drafts(self) -> bool:
        """True if drafts are drawn, and accepted by the ratio of two models' probabilities, when sampling."""
        return self.use_logits

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        if self.max_nodes is not None:
            return self.max_nodes
        most = self.most_len
        return most if self.num_branches == 1 else min(most * self.num_branches, self.tree_nodes)

    @property
    def start_len(self) -> int:
        """Most tokens drafted along one branch in a text's first step."""
        return self.first_len if self.draft_len is None else self.draft_len

    @property
    def most_len(self) -> int:
        """Most tokens drafted along one branch in any step."""
        chooses = self.num_branches == 1 and self.max_nodes is None and self.confidence_threshold is None
        return self.longest if self.draft_len is None and chooses else self.start_len

    @property
    def translated_budget(self) -> int:
        """The same in the target's tokens, where the draft has a tokenizer of its own."""
        return TRANSLATED * self.node_budget

    def to_vllm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """vLLM's `speculative_config`; it drafts chains of a fixed length."""
        self._check_chain("vLLM", draft_model)
        devices = self.draft_model_device_list
        parallel = {} if devices is None else {"draft_tensor_parallel_size": len(devices)}
        named = {} if draft_model is None else {"model": os.fspath(draft_model)}
        return {"method": self.vllm_method, **named, "num_speculative_tokens": self.start_len, **parallel}

    def to_tensorrt_llm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """TensorRT-LLM's `DraftTargetDecodingConfig` or that of the head, which draft chains here."""
        self._check_chain("TensorRT-LLM", draft_model)
        named = {} if draft_model is None else {"speculative_model": os.fspath(draft_model)}
        return {"decoding_type": self.tensorrt_type, "max_draft_len": self.start_len, **named}

    def _check_chain(self, project: str, draft_model: str | os.PathLike[str] | None) -> None:
        """Raise where `project` cannot be told of these drafts."""
        if self.num_branches != 1:
            rule = f"must be 1 for {project}, which is told of chains"
            raise ConfigError("num_branches", rule, self.num_branches, "Use 1.")
        if self.needs_file and draft_model is None:
            raise ConfigError("draft_model", f"must be given for {project}", None, "Name its folder or its hub name.")
        if draft_model is not None:
            check_path("draft_model", draft_model, "a folder or a name on the hub")
        fixed_length = ("confidence_threshold",) if self.confidence_threshold == 0.0 else ()
        self.check_carried(project, "draft_len", "num_branches", *self.device_fields.values(), *fixed_length)


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
