"""What of a model decides how its forward computes: compared before each call, so that what was found out holds still.

Names                              Why
`_forward_hooks`, `_forward_pre_hooks` and the global ones of torch
                                   a hook may compute anything, one position at a time
`_compiled_call_impl`              of a module compiled in place
`_disable_adapters`, `_active_adapter`, `merged_adapters`
                                   PEFT's layers keep the adapters that act in them
"""

import types
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from hf_specdec.compat.masks import attention_implementation

__all__ = ["fingerprint"]

# Hooks that leave what is computed as it is: ours are there for single forwards, transformers' collect outputs.
HARMLESS_HOOKS = ("hf_specdec.", "transformers.utils.output_capturing")
OWN_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CHANGES = {"forward", "_compiled_call_impl", "_active_adapter"}
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def fingerprint(model: PreTrainedModel) -> Hashable:
    """Equal for two calls on one model if it computes alike in both; weights may differ.

    Covers submodules and their classes, forwards replaced on an instance or a class, hooks, train mode, adapters,
    attention implementation, dtype, device and compilation. Holds no part of the model alive.
    """
    modules = list(model.modules())
    classes = [type(module) for module in modules]
    changes: list[Hashable] = []
    for place, module in enumerate(modules):
        attributes = vars(module)
        if module.training or not CHANGES.isdisjoint(attributes) or any(map(attributes.get, HOOKS)):
            changes += ((place, change) for change in _changes_of(attributes))
    return (
        attention_implementation(model.config),
        model.dtype,
        model.device,
        tuple(map(id, modules)),
        tuple((cls, cls.forward) for cls in dict.fromkeys(classes)),
        tuple(changes),
        tuple(_same(vars(model)[name]) for name in OWN_METHODS if name in vars(model)),
        tuple(number for name in GLOBAL_HOOKS for number in _hooks(getattr(torch_module, name))),
    )


def _changes_of(attributes: Mapping[str, Any]) -> Iterator[Hashable]:
    """What was done to one module: train mode, hooks, a forward of its own or a compiled one, adapters that act."""
    if attributes["training"]:
        yield "training"
    for name in HOOKS:
        if numbers := _hooks(attributes[name]):
            yield name, numbers
    for name in ("forward", "_compiled_call_impl"):
        if attributes.get(name) is not None:
            yield name, _same(attributes[name])
    if "_active_adapter" in attributes:
        yield repr([attributes.get(name) for name in ADAPTER_STATE])


def _hooks(hooks: Mapping[int, Any]) -> tuple[int, ...]:
    """Numbers of the hooks that may change what is computed; torch gives each number once in a process."""
    found = [(number, hooks.get(number)) for number in tuple(hooks)]
    return tuple(n for n, hook in found if not str(getattr(hook, "__module__", "")).startswith(HARMLESS_HOOKS))


class _Same:
    """Equal to another one of the same living object; keeps it from being mistaken for one made in its place later."""

    __slots__ = ("number", "reference")

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        self.reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (value := self.reference()) is not None and value is other.reference()


def _same(function: Any) -> Hashable:
    """Stands for a function; a bound method is made anew each time that it is asked for."""
    if isinstance(function, types.MethodType):
        return _same(function.__self__), _same(function.__func__)
    try:
        return _Same(function)
    except TypeError:  # a class without weak references
        return id(function)
