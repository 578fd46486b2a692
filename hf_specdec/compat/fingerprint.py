"""Compares how a model computes with an earlier call, and finds code from elsewhere that may change a cache.

Names                              Why
`_forward_hooks`, `_forward_pre_hooks` and the global ones of torch
                                   a hook may compute anything; torch never gives two hooks one key
`_compiled_call_impl`              of a module compiled in place
`_disable_adapters`, `_active_adapter`, `merged_adapters`, `scaling`
                                   PEFT's layers keep the adapters that act in them, and their scales
"""

import functools
import inspect
import types
import weakref
from abc import ABC
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.compat.attention import attention_function_of, attention_implementation, mask_function_of
from hf_specdec.compat.caches import CACHE_NAMES, OLD_NAMES
from hf_specdec.compat.modules import modules_of

# Hooks and forwards that leave what is computed as it is: ours are there for single forwards, transformers' collect
# outputs.
HARMLESS = ("hf_specdec.", "transformers.utils.output_capturing")
# Of gradient checkpointing, which trainers set anew around each `generate`: outputs of the embeddings may be trained.
GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
LIBRARIES = ("torch.", "transformers.", "accelerate.", "bitsandbytes.", "hf_specdec.")
OWN_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
CACHES = frozenset({*CACHE_NAMES, *OLD_NAMES, "past_key_value", "layer_past"} - {"state"})  # names of arguments
CONTAINERS = (list, tuple, dict, torch.Tensor)  # states of RWKV and its like
NUMBERS = {bool, int, float}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal for two calls on one model if it computes alike in both; weights may differ. Holds no part of it alive.

    Attributes:
        modules: the submodules; none is mistaken for another one that is made in its place later.
        classes: their classes, with the forwards of these.
        settings: the configuration.
        state: attention with its functions, dtype and device; then what empty parts say is not there: train mode,
            adapters, hooks, replaced forwards, compilation, and the flags of code from elsewhere.
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
    modules, changes = modules_of(model), list[Hashable]()
    foreign = {cls for cls in set(map(type, modules)) if not cls.__module__.startswith(LIBRARIES)}
    for place, module in enumerate(modules):
        attributes = vars(module)
        if type(module) in foreign or attributes.get("training"):  # probabilities of dropout
            changes.append((place, attributes.get("training"), _flags(attributes)))
        if attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"):
            changes += [(place, hook) for hook in _hooks_in(attributes, HOOKS)]
        for name in ("forward", "_compiled_call_impl"):
            if (replaced := attributes.get(name)) is not None and not _is_harmless(replaced):
                changes.append((place, name, _reference(replaced), _flags_of_owner(replaced)))
        if "_active_adapter" in attributes:
            changes.append((place, repr([attributes.get(name) for name in ADAPTER_STATE])))
    name = attention_implementation(model.config) or ""
    functions = [function for function in (attention_function_of(name), mask_function_of(name)) if function is not None]
    return Fingerprint(
        modules=tuple(map(weakref.ref, modules)),
        classes=(
            *((cls, cls.forward) for cls in dict.fromkeys(module.__class__ for module in modules)),
            *(getattr(type(model), name, None) for name in OWN_METHODS),
        ),
        settings=_settings(model.config),
        state=(
            name,
            model.dtype,
            model.device,
            tuple(_reference(getattr(function, "original", function)) for function in functions),
            tuple(changes),
            tuple(_reference(vars(model)[name]) for name in OWN_METHODS if name in vars(model)),
            tuple(_hooks_in(vars(torch_module), GLOBAL_HOOKS)),
        ),
    )


def hooks_of(module: torch.nn.Module) -> tuple[Hashable, ...]:
    """Hooks of the module, of its parts and of all modules, which torch's compiler does not look at again."""
    parts = enumerate(map(vars, modules_of(module)))
    of_parts = [(place, hook) for place, part in parts for hook in _hooks_in(part, HOOKS)]
    return (*of_parts, *_hooks_in(vars(torch_module), GLOBAL_HOOKS))


def is_library_code(module: torch.nn.Module) -> bool:
    """Returns whether forwards run no class or function that torch, transformers and this package do not have."""
    parts = modules_of(module)
    forwards = [forward for part in parts if (forward := vars(part).get("forward")) is not None]
    if not all(map(_is_harmless, forwards)):
        return False
    return all(cls.forward.__module__.startswith(LIBRARIES) for cls in {type(part) for part in parts})


def foreign_code(model: PreTrainedModel) -> str | None:
    """Reason why hooks, or forwards put in the place of a library's, keep drafts from the model; `None` without any.

    A hook gets the cache on attention or a layer with the keyword arguments, and after a model's forward in its output.
    PEFT's hooks are for the rows or the tokens of one call.
    """
    modules = modules_of(model)
    for module in modules:
        attributes, name, takes_cache = vars(module), type(module).__name__, _takes_cache(type(module).forward)
        forward = attributes.get("forward", type(module).forward)
        if takes_cache and type(module).__module__.startswith(LIBRARIES) and _is_foreign(forward):
            return _changes_cache("forward", forward, name)
        for kind in HOOKS:
            for key, hook in tuple(attributes.get(kind, {}).items()):
                if _module_of(hook).startswith("peft.") and not _is_harmless(hook):
                    return f"PEFT's hook {_name_of(hook)} of {name} is for the rows or tokens of one call"
                is_model = isinstance(module, PreTrainedModel)
                gets_it = kind == "_forward_hooks" if is_model else key in attributes[f"{kind}_with_kwargs"]
                if takes_cache and gets_it and _is_foreign(hook):
                    return _changes_cache("hook", hook, name)
    hooks = [hook for kind in GLOBAL_HOOKS for hook in tuple(vars(torch_module)[kind].values())]
    return next((_changes_cache("hook", hook, "all modules") for hook in hooks if _is_foreign(hook)), None)


def foreign_cache(cache: Any) -> str | None:
    """Name of a class or method in a cache that is not transformers' own, or `None`: it may keep columns in any way."""
    if cache is None or isinstance(cache, CONTAINERS):
        return None
    inner = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    caches = [cache, *(part for part in inner if part is not None)]
    objects = [*caches, *(layer for part in caches for layer in getattr(part, "layers", ()))]
    lazy = [layer for part in caches if (layer := getattr(part, "layer_class_to_replicate", None)) is not None]
    for base in (base for cls in dict.fromkeys((*map(type, objects), *lazy)) for base in cls.__mro__):
        if base not in (object, ABC) and not base.__module__.startswith("transformers."):
            return str(base.__name__)
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and not _module_of(function).startswith(LIBRARIES):
                return f"{base.__name__}.{name}"
    for owner in objects:
        for name, value in vars(owner).items():
            if callable(value) and callable(getattr(type(owner), name, None)):
                return f"{type(owner).__name__}.{name}"
    return None


def _changes_cache(kind: str, function: Any, owner: str) -> str:
    return f"the {kind} {_name_of(function)} of {owner} gets the cache and may change it"


@functools.cache
def _takes_cache(forward: Any) -> bool:
    """Returns whether the forward of a module's class takes a cache, as one from elsewhere may among any arguments."""
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return not CACHES.isdisjoint(parameters) or (takes_any and _is_foreign(forward))


def _hooks_in(attributes: Mapping[str, Any], names: Iterable[str]) -> Iterator[Hashable]:
    """Keys of the hooks that may change what is computed, in the order in which they run."""
    for name in names:
        for key, hook in tuple(attributes.get(name, {}).items()):
            if not _is_harmless(hook):
                yield name, key, _flags_of_owner(hook)


def _is_harmless(hook: Any) -> bool:
    """Returns whether a hook or forward leaves what a module computes as it is."""
    module = _module_of(hook)
    is_gradients = _name_of(hook) in GRADIENT_HOOKS and module.startswith(("transformers.", "peft."))
    return is_gradients or module.startswith(HARMLESS)


def _is_foreign(function: Any) -> bool:
    return not _is_harmless(function) and not _module_of(function).startswith((*LIBRARIES, "peft."))


def _function_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _module_of(function: Any) -> str:
    """Name of the file's module that has the code, whatever function it wraps."""
    function = _function_of(function)
    names = getattr(function, "__globals__", None)
    return str(getattr(function, "__module__", "") if names is None else names.get("__name__", ""))


def _name_of(function: Any) -> str:
    function = _function_of(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _reference(value: Any) -> Hashable:
    """A key of one object or function, which keeps it not alive; a bound method is made anew each time it is read."""
    if isinstance(value, types.MethodType):
        return _reference(value.__self__), _reference(value.__func__)
    try:
        hash(value)
        return weakref.ref(value)
    except TypeError:  # a class without hashes or weak references
        return id(value)


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


def _settings(config: Any) -> str:
    """A configuration's values, those of its parts included."""
    values = vars(config).items()
    return repr([(name, _settings(v) if isinstance(v, PreTrainedConfig) else v) for name, v in values])
