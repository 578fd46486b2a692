"""One call of `generate`: what it asks for, read once, and what it asks it of: the model, and the prepared inputs.

Made of the arguments by `arguments.read_request`; `prepared` is added once transformers has prepared the call.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache

from hf_specdec.common.stats import SpecStep
from hf_specdec.compat.attention import position_limit
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.fingerprint import Fingerprint, fingerprint
from hf_specdec.engine.call import Call
from hf_specdec.engine.cost.cost_model import StepCosts
from hf_specdec.engine.draft_pairing import draft_capability, translations_of
from hf_specdec.engine.head_pairing import checkpoint_head_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.forward.capabilities.findings import Found
from hf_specdec.forward.inputs import rows_of
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.model_runner import Tier
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method
from hf_specdec.methods.common.translation import Translation

Observer = Callable[[SpecStep], None]


def _no_drafter(config: SpecConfig, context: DrafterContext) -> BaseDrafter:
    raise NotImplementedError("transformers' own loop has no drafter")


NO_METHOD = Method(name="none", config_class=SpecConfig, summary="transformers' own loop", make=_no_drafter)


@dataclass(frozen=True, eq=False)
class Request:
    """A call of `generate`, its arguments never changed. What needs a probe or a checkpoint is looked up when used.

    Attributes:
        model (`PreTrainedModel`): the target.
        arguments: of `generate`, those that this package takes over left out once they are read.
        call_config (`GenerationConfig | None`): the call's generation configuration; the model's counts after it.
        method (`Method`): how to draft; its name is empty for a drafter of the user's.
        config (`SpecConfig`): the method's configuration.
        budget (`int`): most drafted tokens of a row and step.
        extra_columns (`int`): most tokens that a step computes besides the current one and the drafted ones.
        observer: called with each step.
        assistant_model: the draft model or head, for methods that take one.
        tokenizers: the target's and the draft model's, where they differ.
        is_default (`bool`): whether the method comes from a generation configuration, not from the call itself. A
            default that cannot be honoured decodes plainly.
        prepared (`Call | None`): the call as transformers prepared it; `None` before.
    """

    model: PreTrainedModel
    arguments: Mapping[str, Any]
    call_config: GenerationConfig | None = None
    method: Method = NO_METHOD
    config: SpecConfig = field(default_factory=SpecConfig)
    budget: int = 0
    extra_columns: int = 0
    observer: Observer | None = None
    assistant_model: Any = None
    tokenizers: tuple[Any, Any] | None = None
    is_default: bool = False
    prepared: Call | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, arguments: Mapping[str, Any]) -> Self:
        """The call `model.generate(**arguments)`, its method not read yet."""
        return cls(model, arguments, arguments.get("generation_config"))

    @property
    def configs(self) -> tuple[GenerationConfig, ...]:
        """The generation configurations, the one that counts most first."""
        configs = (self.call_config, self.model.generation_config)
        return tuple(config for config in configs if config is not None)

    def setting(self, name: str) -> Any:
        """Value of a generation setting, an argument before the configurations; `None` where it is unset."""
        return self.arguments[name] if name in self.arguments else self.configured(name)

    def configured(self, name: str) -> Any:
        """Value that the configurations give a setting; `None` where none does."""
        return next((v for v in (getattr(config, name, None) for config in self.configs) if v is not None), None)

    def is_models_default(self, name: str) -> bool:
        """Returns whether the model's generation configuration alone gives a setting its value."""
        return name not in self.arguments and getattr(self.call_config, name, None) is None

    def without(self, *names: str) -> dict[str, Any]:
        """The arguments with these settings unset, wherever they come from; the caller's objects stay as they are."""
        left = {name: value for name, value in self.arguments.items() if name not in names}
        if any(getattr(self.call_config, name, None) is not None for name in names):
            left["generation_config"] = config = copy.deepcopy(self.call_config)
            for name in names:
                setattr(config, name, None)
        # An argument wins over the model's default.
        return left | {name: None for name in names if getattr(self.model.generation_config, name, None) is not None}

    @property
    def is_assisted(self) -> bool:
        """True if transformers' assisted decoding is asked for."""
        return self.config.engine == "assisted"

    @property
    def user_callbacks(self) -> tuple[Any, ...]:
        """The caller's code that runs between the forwards: an observer, a streamer, a drafter."""
        drafter = None if self.method.name else self.method.make
        callbacks = (self.observer, drafter, self.arguments.get("streamer"))
        return tuple(callback for callback in callbacks if callback is not None)

    @property
    def model_name(self) -> str:
        """Class of the model, for messages."""
        return type(self.model).__name__

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint."""
        return fingerprint(self.model) if self.prepared is None else self.prepared.now

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts that follow from the model's structure alone."""
        return state_of(self.model).facts_of(self.fingerprint)

    @cached_property
    def probed(self) -> Found:
        """Results of the model's probe."""
        return state_of(self.model).findings.of(self.model, self._encoder_kwargs, now=self.fingerprint)

    @property
    def tier(self) -> Tier:
        """Tier of the call: a tree, a chain, or one token (`"plain"`) verified by a forward."""
        return self.probed.capability.tier

    def batch_reason(self) -> str | None:
        """Reason to decode batches plainly, or `None`; the model is probed at its first batch."""
        return self.probed.batch_fallback_reason(self.model, self._encoder_kwargs)

    @property
    def call(self) -> Call:
        """The prepared call."""
        assert self.prepared is not None
        return self.prepared

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the model's forward besides token ids: masks, positions, cache, encoder outputs."""
        return self.call.model_kwargs

    @property
    def num_rows(self) -> int:
        """Sequences of the prepared call."""
        return len(self.call.input_ids)

    @property
    def has_static_cache(self) -> bool:
        """True if the prepared call has a static cache, which an encoder-decoder holds within its own."""
        cache = self.call.cache
        return isinstance(getattr(cache, "self_attention_cache", cache), StaticCache)

    @property
    def _encoder_kwargs(self) -> dict[str, Any] | None:
        """Encoder outputs and mask of the call's first row, with which the probe tries a decoder."""
        if self.prepared is None or self.kwargs.get("encoder_outputs") is None:
            return None
        probed = {name: self.kwargs.get(name) for name in ("encoder_outputs", "attention_mask")}
        return rows_of({name: value for name, value in probed.items() if value is not None}, [0], self.num_rows)

    @cached_property
    def network(self) -> PreTrainedModel | DraftHead | None:
        """The draft model or head, be it one of the target's checkpoint; `None` without one.

        Raises:
            CheckpointError, UnsupportedModelError: the target's checkpoint has no head.
        """
        if self.assistant_model is not None:
            return cast("PreTrainedModel | DraftHead | None", self.assistant_model)
        return None if self.method.checkpoint_head is None else checkpoint_head_of(self.model, self.method, self.config)

    @cached_property
    def draft(self) -> tuple[Tier, ModelFacts]:
        """Forwards that the draft model computes right, and facts that follow from its structure.

        Raises:
            ConfigError: target and draft do not go together.
            UnsupportedModelError: the draft cannot roll back.
        """
        now = fingerprint(self.assistant_model)
        translates = self.tokenizers is not None
        tier = draft_capability(self.model, self.assistant_model, translates=translates, now=now).tier
        return tier, state_of(self.assistant_model).facts_of(now)

    @cached_property
    def translations(self) -> list[Translation] | None:
        """Each row's prompt in the draft model's vocabulary; `None` where that is the target's."""
        return None if self.tokenizers is None else translations_of(self.call, *self.tokenizers)

    @cached_property
    def drafts_with_network(self) -> bool:
        """True if there is a network that drafts, and it has positions for its prompt."""
        network = self.network
        if network is None or isinstance(network, DraftHead) or self.prepared is None:
            return network is not None
        limit = self.draft[1].of(position_limit, network)
        translations = self.translations
        lengths = [self.call.input_ids.shape[1]] if translations is None else [len(t.fixed) - 1 for t in translations]
        return limit is None or max(lengths) <= limit

    @property
    def device(self) -> torch.device:
        """Device of the call's inputs."""
        return input_device(self.model) if self.prepared is None else self.prepared.input_ids.device

    @cached_property
    def costs(self) -> StepCosts | None:
        """Costs of the target's forwards, where the method drafts as many tokens as save time."""
        if not self.config.fits_costs:
            return None
        is_static = self.prepared is not None and self.has_static_cache
        is_fixed = self.config.is_deterministic
        return state_of(self.model).step_costs(self.model, self.device, is_fixed=is_fixed, is_static=is_static)


def prompt_length(model: PreTrainedModel, arguments: Mapping[str, Any]) -> int:
    """Tokens in front of the new ones in the output of `generate`."""
    names = ("decoder_input_ids",) if model.config.is_encoder_decoder else ("inputs", "input_ids")
    prompt = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return int(model.config.is_encoder_decoder) if prompt is None else int(prompt.shape[1])
