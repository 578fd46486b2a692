"""Properties of a model that decide how its forward computes, compared before each call with those of the last one.

Names                              Why
`_forward_hooks`, `_forward_pre_hooks` and the global ones of torch
                                   a hook may compute anything, one position at a time
`_compiled_call_impl`              of a module compiled in place
`_disable_adapters`, `_active_adapter`, `merged_adapters`, `scaling`
                                   PEFT's layers keep the adapters that act in them, and their scales
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.compat.attention import attention_function_of
from hf_specdec.compat.identity import SameCode, same
from hf_specdec.compat.masks import attention_implementation, mask_function_of
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.peft_hooks import is_adapter_hook, rows_of_tasks

# Hooks and forwards that leave what is computed as it is: ours are there for single forwards, transformers' collect
# outputs.
HARMLESS_HOOKS = ("hf_specdec.", "transformers.utils.output_capturing")
# Of gradient checkpointing, which trainers set anew around each `generate`: outputs of the embeddings may be trained.
GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
LIBRARIES = ("torch.", "transformers.", "hf_specdec.")
OWN_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
NUMBERS = {bool, int, float}
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal for two calls on one model if it computes alike in both; weights may differ. Holds no part of it alive.

    Attributes:
        modules: the submodules; none is mistaken for another one that is made in its place later.
        classes: their classes, with the forwards of these.
        settings: the configuration.
        state: forwards replaced on an instance, hooks, train mode, adapters, dtype, device, compilation, the functions
            of attention and masks, and the flags of code from elsewhere and in train mode.
    """

    modules: tuple[Hashable, ...]
    classes: tuple[Hashable, ...]
    settings: str
    state: tuple[Hashable, ...]

    @property
    def structure(self) -> Hashable:
        """All but the state."""
        return self.modules, self.classes, self.settings


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """The model's fingerprint as it is now."""
    modules = modules_of(model)
    changes: list[Hashable] = []
    foreign = {cls: not cls.__module__.startswith(LIBRARIES) for cls in set(map(type, modules))}
    for place, module in enumerate(modules):
        attributes = vars(module)
        if foreign[type(module)]:
            changes.append((place, _flags(attributes)))
        if (
            attributes.get("training")
            or attributes.get("_forward_hooks")
            or attributes.get("_forward_pre_hooks")
            or "forward" in attributes
            or "_compiled_call_impl" in attributes
            or "_active_adapter" in attributes
        ):
            changes += ((place, change) for change in _changes_of(attributes))
    return Fingerprint(
        modules=tuple(map(weakref.ref, modules)),
        classes=(
            *((cls, cls.forward) for cls in dict.fromkeys(module.__class__ for module in modules)),
            *(getattr(type(model), name, None) for name in OWN_METHODS),
        ),
        settings=_settings(model.config),
        state=(
            attention_implementation(model.config),
            model.dtype,
            model.device,
            tuple(changes),
            tuple(same(vars(model)[name]) for name in OWN_METHODS if name in vars(model)),
            _global_hooks(),
            _attention_of(model),
        ),
    )


def hooks_of(module: torch.nn.Module) -> tuple[Hashable, ...]:
    """Hooks of the module, of its parts and of all modules, which torch's compiler does not look at again."""
    parts = enumerate(map(vars, modules_of(module)))
    own = [(place, name, _hooks(part[name])) for place, part in parts for name in HOOKS if part.get(name)]
    return (*(hook for hook in own if hook[-1]), *_global_hooks())


def is_library_code(module: torch.nn.Module) -> bool:
    """Returns whether forwards run no hook, class or function that torch, transformers and this package do not have.

    Code from elsewhere may count its calls, say, and compute something else at some count.
    """
    parts = modules_of(module)
    forwards = [forward for part in parts if (forward := vars(part).get("forward")) is not None]
    if hooks_of(module) or not all(map(is_harmless, forwards)):
        return False
    return all(cls.forward.__module__.startswith(LIBRARIES) for cls in {type(part) for part in parts})


def _global_hooks() -> tuple[Hashable, ...]:
    return tuple(number for name in GLOBAL_HOOKS for number in _hooks(getattr(torch_module, name)))


def _settings(config: Any) -> str:
    """A configuration's values, those of its parts included."""
    values = vars(config).items()
    return repr([(name, _settings(v) if isinstance(v, PreTrainedConfig) else v) for name, v in values])


def _changes_of(attributes: Mapping[str, Any]) -> Iterator[Hashable]:
    """Changes of one module: train mode, hooks, a forward of its own or a compiled one, active adapters."""
    if attributes.get("training"):  # probabilities of dropout
        yield "training", _flags(attributes)
    for name in HOOKS:
        if hooks := _hooks(attributes.get(name, {})):
            yield name, hooks
    for name in ("forward", "_compiled_call_impl"):
        own = attributes.get(name)
        if own is not None and not is_harmless(own):
            yield name, same(own), _flags_of_owner(own)
    if "_active_adapter" in attributes:
        yield repr([attributes.get(name) for name in ADAPTER_STATE])


def _hooks(hooks: Mapping[int, Any]) -> tuple[Hashable, ...]:
    """Keys of the hooks that may change what is computed, in the order in which they run.

    PEFT's that say which adapters act in one call are left out: an adapter computes as those that are active do. Those
    that say which tasks are alike in calls of as many rows.
    """
    found = [hook for hook in tuple(hooks.values()) if not (is_harmless(hook) or is_adapter_hook(hook))]
    return tuple(
        (SameCode(hook), *_flags_of_owner(hook)) if (rows := rows_of_tasks(hook)) is None else ("tasks", rows)
        for hook in found
    )


def is_harmless(hook: Any) -> bool:
    """Returns whether a hook leaves what a forward computes as it is."""
    module = str(getattr(hook, "__module__", ""))
    is_gradients = getattr(hook, "__name__", "") in GRADIENT_HOOKS and module.startswith(("transformers.", "peft."))
    return is_gradients or module.startswith(HARMLESS_HOOKS)


def _flags_of_owner(function: Any) -> tuple[Hashable, ...]:
    """Those of the object whose method a hook or forward is, or of the hook itself."""
    return _flags(getattr(getattr(function, "__self__", function), "__dict__", {}))


def _flags(attributes: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Values that may switch a computation on or off: words, and numbers, which may be counters, as being 0 or not."""
    return tuple(
        (name, value if type(value) is str else value != 0)
        for name, value in attributes.items()
        if type(value) in NUMBERS or type(value) is str
    )


def _attention_of(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """The functions registered for the model's attention and its masks; ours stand for those that they hold."""
    name = attention_implementation(model.config) or ""
    found = (attention_function_of(name), mask_function_of(name))
    return tuple(same(getattr(function, "original", function)) for function in found if function is not None)
