"""The ways in: `enable` and `disable`, `SpecGenerationMixin`, and `decode` for `custom_generate`.

All of them end in `transformers`' own `generate` with a decoding loop of ours as its `custom_generate`, so every
argument, processor, criterion and cache is prepared by transformers itself.

    hf_specdec.enable(model)
    model.generate(**inputs, spec_method="prompt_lookup")
"""

from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.api.enabled_model import SpecGenerationMixin, become_enabled, become_plain
from hf_specdec.call.arguments import added_arguments
from hf_specdec.call.generate import decode
from hf_specdec.compat.generation import keep_own_settings, leave_own_settings, without_settings
from hf_specdec.compat.models import generation_model
from hf_specdec.compat.modules import remove_output_hooks
from hf_specdec.engine.model_state import ATTRIBUTE, state_of
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.capabilities.probe import Capability
from hf_specdec.kernels.xformers import check_attention
from hf_specdec.methods.auto.method import give_memory, memory_in_use
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.registry import config_arguments

__all__ = ["SpecGenerationMixin", "capability", "decode", "disable", "enable", "spec_memory"]

Model = TypeVar("Model")


def enable(
    model: Model, *, spec_memory: SpecMemory | None = None, plain_kernels: bool | None = None, **configs: Any
) -> Model:
    """Turn on `spec_method=` for `model.generate`; returns the model. Idempotent, undone by `disable`.

    The model gets a subclass of its class with another `generate`; `model.__class__` stays as it is. Copies and
    pickles are enabled too.

    Args:
        model (`PreTrainedModel`): a transformers model that generates; PEFT-wrapped, quantised, dispatched and compiled
            ones too.
        spec_memory (`SpecMemory`, *optional*): what `spec_method="auto"` remembers, loaded from a file or shared with
            other models of the same tokenizer.
        plain_kernels (`bool`, *optional*, defaults to `True` in bf16 and fp16, or as it is): whether calls without
            speculation compute by this package's CPU kernels too, so that they are faster and in bf16 and fp16 write
            the text of every `spec_method`. These kernels round otherwise than torch's: as under `torch.compile`, near
            ties can fall otherwise than before `enable`. `False` leaves such calls as transformers has them.
        configs: defaults for this model: a method's configuration under the name of its argument of `generate`,
            as in `enable(model, prompt_lookup_config=[10, 2, [0]])`.

    Raises:
        UnsupportedModelError: the model has no `generate`, or one of your own on the instance, or its class refuses
            subclasses.
        ConfigError: an unknown or invalid configuration, or an attention that the model cannot use.
    """
    inner = _generating(model)
    if spec_memory is not None and not isinstance(spec_memory, SpecMemory):
        remedy = "Make one with hf_specdec.SpecMemory() or SpecMemory.load(path)."
        raise ConfigError("spec_memory", "must be a SpecMemory", spec_memory, remedy)
    defaults: dict[str, SpecConfig] = {}
    methods = config_arguments()
    for name, value in configs.items():
        if name not in methods:
            raise ConfigError(
                name,
                f"must be one of {', '.join(sorted([*methods, 'plain_kernels', 'spec_memory']))}",
                value,
                "Pass arguments of a call to generate.",
            )
        defaults[methods[name].name] = methods[name].config_class.parse(value, name)
    state = state_of(inner)
    state.defaults.update(defaults)
    if spec_memory is not None:
        give_memory(state.method_state, spec_memory)
    if plain_kernels is not None:
        state.plain_kernels = plain_kernels
    check_attention(inner)
    if keep_own_settings(inner.generation_config):
        state.keeps_settings = True
    become_enabled(inner)
    return model


def disable(model: Model) -> Model:
    """Undo `enable`: the model generates as its class does, and what was kept on it is dropped. Returns the model.

    So are the settings of `enable`, as `plain_kernels`: enabled again, it has those of the new call alone.

    Its generation configuration loses the settings that only an enabled model reads, as `spec_method`, so that they are
    unknown again; a configuration object that has some is replaced by a copy, as other models may share it.

    Args:
        model (`PreTrainedModel`): the model that `enable` was given.

    Raises:
        UnsupportedModelError: it is no model with a `generate`.
    """
    inner = _generating(model)
    if become_plain(inner):
        inner.generation_config = without_settings(inner.generation_config, added_arguments())
    if ATTRIBUTE in vars(inner):
        remove_output_hooks(inner)
    state = vars(inner).pop(ATTRIBUTE, None)
    if state is not None and state.keeps_settings:
        leave_own_settings(inner.generation_config)
    return model


def capability(model: Any) -> Capability:
    """Tier of `model` and the reason for it; found by a few small forwards, then kept on the model.

    Args:
        model (`PreTrainedModel`): a transformers model that generates, enabled or not.

    Raises:
        UnsupportedModelError: it has no `generate`.
    """
    inner = _generating(model)
    return state_of(inner).findings.of(inner).capability


def spec_memory(model: Any) -> SpecMemory:
    """The memory that `spec_method="auto"` uses on `model`: save it, or give it to another model of its tokenizer.

    The one that `enable` was given, else the one that calls have made so far, else a new one, which they will use.

    ```python
    hf_specdec.spec_memory(model).save("memory.safetensors")
    ```

    Args:
        model (`PreTrainedModel`): a transformers model that generates, enabled or not.

    Raises:
        UnsupportedModelError: it has no `generate`.
    """
    state = state_of(_generating(model))
    return memory_in_use(state.method_state)


def _generating(model: Any) -> PreTrainedModel:
    """The transformers model inside `model`, if it generates."""
    inner = generation_model(model)
    if not isinstance(inner, PreTrainedModel) or not isinstance(inner, GenerationMixin) or not inner.can_generate():
        raise UnsupportedModelError(
            f"`model` must be a transformers model with `generate`, but is {type(inner).__name__}. "
            "Load it with an AutoModelForCausalLM or AutoModelForSeq2SeqLM class, and unwrap it (model.module) where "
            "torch has wrapped it."
        )
    return inner
