"""One call of `generate`, read once: what it asks for of this package, and the settings that transformers gets."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.common.observer import SpecStep
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method

Observer = Callable[[SpecStep], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of generation settings in one call: an argument first, then the configurations in their order.

    Attributes:
        arguments: of `generate`; never changed.
        given (`GenerationConfig | None`): the call's configuration.
        own (`GenerationConfig`): the model's.
    """

    arguments: Mapping[str, Any]
    given: GenerationConfig | None
    own: GenerationConfig

    @classmethod
    def of(cls, model: PreTrainedModel, arguments: Mapping[str, Any]) -> Self:
        """Settings of `model.generate(**arguments)`."""
        return cls(arguments, arguments.get("generation_config"), model.generation_config)

    @property
    def configs(self) -> tuple[GenerationConfig, ...]:
        """The configurations, the one that counts most first."""
        return (self.own,) if self.given is None else (self.given, self.own)

    def __call__(self, name: str) -> Any:
        """Value of one setting; `None` where it is unset."""
        return self.arguments[name] if name in self.arguments else self.configured(name)

    def configured(self, name: str) -> Any:
        """Value that the configurations give a setting; `None` where none does."""
        return next((v for v in (getattr(config, name, None) for config in self.configs) if v is not None), None)

    def is_own(self, name: str) -> bool:
        """Returns whether the model's own configuration alone gives a setting its value."""
        return name not in self.arguments and getattr(self.given, name, None) is None

    def without(self, *names: str) -> dict[str, Any]:
        """The arguments with these settings unset, wherever they come from; the caller's objects stay as they are."""
        left = {name: value for name, value in self.arguments.items() if name not in names}
        if any(getattr(self.given, name, None) is not None for name in names):
            left["generation_config"] = config = copy.deepcopy(self.given)
            for name in names:
                setattr(config, name, None)
        # An argument wins over the model's default.
        return left | {name: None for name in names if getattr(self.own, name, None) is not None}


@dataclass(frozen=True, slots=True)
class Request:
    """A call that asks for a method.

    Attributes:
        method (`Method | None`): `None` for a drafter of the user's own.
        config (`SpecConfig`): the method's configuration.
        budget (`int`): most drafted tokens of a row and step.
        make_drafter: makes the drafter of one sequence.
        settings (`Settings`): arguments that this package does not take over, and the generation configurations.
        observer: called with each step.
        assistant_model: the draft model or head, for methods that take one.
        is_default (`bool`): whether the method comes from a generation configuration, not from the call itself. A
            default that cannot be honoured decodes plainly.
        tokenizers: the target's and the draft model's, where they differ.
        extra_columns (`int`): most tokens that a step computes besides the current one and the drafted ones.
    """

    method: Method | None
    config: SpecConfig
    budget: int
    make_drafter: Callable[[DrafterContext], BaseDrafter]
    settings: Settings
    observer: Observer | None = None
    assistant_model: Any = None
    is_default: bool = False
    tokenizers: tuple[Any, Any] | None = None
    extra_columns: int = 0

    @property
    def name(self) -> str:
        """The method's name; empty for a drafter of the user's own."""
        return "" if self.method is None else self.method.name

    @property
    def is_assisted(self) -> bool:
        """True if transformers' assisted decoding is asked for."""
        return self.config.engine == "assisted"

    @property
    def user_callbacks(self) -> tuple[Any, ...]:
        """The caller's code that runs between the forwards: an observer, a streamer, a drafter."""
        own_drafter = self.make_drafter if self.method is None else None
        callbacks = (self.observer, own_drafter, self.settings.arguments.get("streamer"))
        return tuple(callback for callback in callbacks if callback is not None)


def prompt_length(model: PreTrainedModel, arguments: Mapping[str, Any]) -> int:
    """Tokens in front of the new ones in the output of `generate`."""
    names = ("decoder_input_ids",) if model.config.is_encoder_decoder else ("inputs", "input_ids")
    prompt = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return int(model.config.is_encoder_decoder) if prompt is None else int(prompt.shape[1])
