"""The class of an enabled model: its own class with a `generate` that takes `spec_method`.

`class LlamaForCausalLM(EnabledGenerationMixin, LlamaForCausalLM)`, made once for a class and given to each of its
models that is enabled. A method of the class keeps its model alive, is bound anew in every copy, and needs no
reference from the model to itself.
"""

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any, Literal, cast, overload

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec.call.custom_generate import plain_steps
from hf_specdec.call.generate import class_generate, generate_with, with_added_arguments
from hf_specdec.common.stats import SpecOutput
from hf_specdec.engine.model_state import ATTRIBUTE, state_of
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels.xformers import check_attention, register

_LOCK = threading.RLock()


class SpecGenerationMixin(GenerationMixin):
    """`GenerationMixin` whose `generate` understands `spec_method`; put it in front of a model class.

    ```python
    class MyModel(SpecGenerationMixin, LlamaForCausalLM): ...
    ```
    """

    @overload
    def generate(self, *args: Any, return_dict_in_generate: Literal[True], **kwargs: Any) -> SpecOutput: ...

    @overload
    def generate(self, *args: Any, **kwargs: Any) -> Any: ...

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`, and with `spec_method` the same result in fewer forwards.

        Args:
            spec_method (`str`, *optional*): how to draft: `"auto"`, `"prompt_lookup"`, `"lookahead"`, `"draft_model"`,
                `"eagle3"`, `"mtp"`, `"dflash"`, or a `Drafter` of your own; `"plain"` drafts nothing, `None` or
                `"none"` is transformers' own loop.
            spec_config (*optional*): the method's configuration: an object, a dict of its fields, or its list form.
            spec_observer (*optional*): called with a `SpecStep` after each verify step.
            auto_config, prompt_lookup_config, lookahead_config, draft_model_config (*optional*): `spec_config` under
                the method's own name; each chooses its method. `ngram_config` and `draft_target_model_config` are
                TensorRT-LLM's names.
            eagle3_config, mtp_config, dflash_config (*optional*): the same for the methods with a draft head.
            args, kwargs: everything that transformers' `generate` takes.

        Returns:
            As transformers' `generate`; with `return_dict_in_generate=True` the output has `spec_stats` too.

        Raises:
            ConfigError: a value of an argument cannot be, or does not go with speculative decoding.
            UnsupportedModelError: the model cannot be driven, or not with this draft.
        """
        return generate_with(cast(PreTrainedModel, self), super().generate, args, kwargs)

    def _prefill(
        self, input_ids: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        """The prompt's forward, as transformers computes it; after it plain decoding may have other kernels."""

        def compute() -> Any:
            return super(SpecGenerationMixin, self)._prefill(input_ids, generation_config, model_kwargs, *args, **more)

        steps = plain_steps.get()
        if steps is None or steps.model is not self:
            return compute()
        return steps.prefill(compute, generation_config, model_kwargs)


SpecGenerationMixin.generate.__signature__ = with_added_arguments(  # type: ignore[attr-defined]
    inspect.signature(GenerationMixin.generate)
)


class EnabledGenerationMixin(SpecGenerationMixin):
    """First base of an enabled model's class, the model's own class being the second.

    `model.__class__` is the model's own class, so that tables keyed by class, names and saved files stay as they are.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call no hook of the model's class: what those set up, a registry say, is for classes that people write."""

    @property
    def __class__(self) -> type:
        """The class that the model has without `enable`."""
        return models_class(type(self))

    @__class__.setter
    def __class__(self, cls: type) -> None:
        """Change the class as `fully_shard` of torch does, with the model still enabled."""
        _set_class(self, enabled_class(cls))

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """Set the attention as transformers does, and refuse one of this package that the model cannot use."""
        check_attention(cast(PreTrainedModel, self), attn_implementation)
        return super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the model's own class, which can be imported."""
        make, args, *rest = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        args = tuple(models_class(arg) if isinstance(arg, type) else arg for arg in args)
        return _made_enabled, (make, args), *rest

    def __setstate__(self, state: Any) -> None:
        register()  # the attention of another process
        super().__setstate__(state)
        self.__dict__[ATTRIBUTE] = copy.copy(state_of(cast(PreTrainedModel, self)))


def models_class(cls: type) -> type:
    """The class that `enabled_class` was made of; `cls` itself where it is no such class."""
    return cls.__bases__[1] if cls.__bases__[:1] == (EnabledGenerationMixin,) else cls


def enabled_class(cls: type) -> type:
    """The one class of enabled models of `cls`, under its name; dropped with the last of them.

    Raises:
        UnsupportedModelError: the class cannot have subclasses.
    """
    cls = models_class(cls)
    with _LOCK:
        subclasses: list[type] = type.__subclasses__(cls)
        made = (sub for sub in subclasses if sub.__bases__ == (EnabledGenerationMixin, cls))
        return next(made, None) or _new_class(cls)


def _new_class(cls: type) -> type:
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, "__slots__": (), "generate": _generate_of(cls)}
    try:
        return types.new_class(
            cls.__name__, (EnabledGenerationMixin, cls), exec_body=lambda namespace: namespace.update(body)
        )
    except TypeError as error:  # of its metaclass
        raise UnsupportedModelError(
            f"`model` must be of a class that can have subclasses, but {cls.__name__} refuses them: {error}. "
            "Call model.generate(custom_generate=hf_specdec.decode, spec_method=...) instead of enabling it."
        ) from error


def _generate_of(cls: Any) -> Callable[..., Any]:
    """`generate` of the enabled models of `cls`, with the arguments of its own."""

    @functools.wraps(cls.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate_with(self, class_generate(self), args, kwargs)

    generate.__doc__ = SpecGenerationMixin.generate.__doc__
    generate.__signature__ = with_added_arguments(inspect.signature(cls.generate))  # type: ignore[attr-defined]
    return generate


def become_enabled(model: PreTrainedModel) -> None:
    """Give `model` its enabled class.

    Raises:
        UnsupportedModelError: it has a `generate` of the user's, which Python would call in the place of a class's.
    """
    with _LOCK:
        if isinstance(model, EnabledGenerationMixin):
            return
        if "generate" in model.__dict__:
            raise UnsupportedModelError(
                f"`model` must have the `generate` of its class, but one was set on this {type(model).__name__}. "
                "Write `del model.generate`, enable the model, then set yours over the enabled one."
            )
        _set_class(model, enabled_class(type(model)))


def become_plain(model: PreTrainedModel) -> bool:
    """Give `model` its own class back; returns whether it had become enabled."""
    if not isinstance(model, EnabledGenerationMixin):
        return False
    attributes = model.__dict__
    if getattr(attributes.get("generate"), "__func__", None) is type(model).generate:  # set to itself by the user
        del attributes["generate"]
    _set_class(model, models_class(type(model)))
    return True


def _set_class(model: Any, cls: type) -> None:
    vars(object)["__class__"].__set__(model, cls)


def _made_enabled(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """An empty model out of what its own class pickles as, enabled."""
    model = make(*args)
    _set_class(model, enabled_class(type(model)))
    return model
