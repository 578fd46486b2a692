"""A model's parts, walked in every call, and the operators of torch that they run.

Names                              Why
`_modules`, `_parameters`, `_base`, `_buffers` read directly, in a quarter of the time that torch's own iteration takes
`_version`, `_non_persistent_buffers_set`
                                   whether weights were written over, and what is no weight
`_forward_hooks`                   hooks are removed without their handles, which transformers does not keep
`_output_capturing_hooks_installed`, `_active_collector`
                                   by which transformers knows whether to put its hooks on a model, and what they keep
`is_in_torch_dispatch_mode`, `_get_current_function_mode_stack`, `DisableTorchFunction`,
`_is_torch_function_mode_enabled`  torch has no public name for whether operations are traced, counted or replaced
`torch._C._nn`                     where functions of `torch.nn.functional` come from, whatever stands in their place
`_grouped_mm`                      products of experts, as torch's modes see them
`DeviceContext`                    the mode of `torch.set_default_device`, which replaces none
`LlamaRMSNorm`                     each model has a norm of its own, some 140 of them with this one's code
`TorchDispatchMode`, `_schema`, `_cdata`
                                   operators as a dispatch mode sees them, and the storages of tensors
"""

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.activations import GELUActivation, GELUTanh, QuickGELUActivation, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm as LlamaRMSNorm
from transformers.utils.output_capturing import _active_collector

grouped_mm = torch._grouped_mm
OUTPUT_HOOKS = "transformers.utils.output_capturing"
NO_BLOCK = contextlib.nullcontext()
ROUNDED_ACTIVATIONS = (GELUActivation, GELUTanh, QuickGELUActivation, SiLUActivation)
FUNCTIONS = ("linear", "scaled_dot_product_attention")  # by which layers and attention compute


def as_read_by(layer: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """The states on the device and in the precision of an output head that is shared between networks.

    accelerate moves them where the weights are elsewhere; quantised weights say nothing about precision.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return states
    if weight.is_floating_point() and weight.itemsize > 1:
        states = states.to(weight.dtype)
    return states if weight.is_meta else states.to(weight.device)


def is_dispatch_traced() -> bool:
    """True if a mode of torch sees every operation of this thread: it counts them, or computes something else."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return bool(is_in_torch_dispatch_mode()) or any(not isinstance(mode, DeviceContext) for mode in modes)


def has_own_functions() -> bool:
    """True if somebody has put others in the place of torch's functions by which layers and attention compute."""
    return any(getattr(torch.nn.functional, name) is not getattr(torch._C._nn, name) for name in FUNCTIONS)


def without_modes() -> contextlib.AbstractContextManager[None]:
    """A block whose calls of torch, and reads of tensors' attributes, no mode for torch's functions sees."""
    return torch._C.DisableTorchFunction() if torch._C._is_torch_function_mode_enabled() else NO_BLOCK


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model and every module in it, each once and none before the one that holds it."""
    modules, seen = [model], {model}
    for module in modules:  # which grows
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def remove_output_hooks(model: torch.nn.Module) -> None:
    """Remove transformers' hooks that collect hidden states, which cannot be pickled; it puts them back when asked."""
    for module in modules_of(model):
        hooks = module._forward_hooks
        keys = [key for key, hook in hooks.items() if getattr(hook, "__module__", None) == OUTPUT_HOOKS]
        if keys:
            module._forward_hooks = type(hooks)((key, hook) for key, hook in hooks.items() if key not in keys)
        vars(module).pop("_output_capturing_hooks_installed", None)


def shows_attentions(module: torch.nn.Module) -> bool:
    """True if the weights of the attention that a module returns are kept: by hooks of its own, or by transformers'."""
    if any(getattr(hook, "__module__", None) != OUTPUT_HOOKS for hook in module._forward_hooks.values()):
        return True
    return any("attentions" in name for name in _active_collector.get() or ())


def is_view_of_weight(tensor: torch.Tensor) -> bool:
    """True for a parameter, a part of one, and a transposed one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def own_weights(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The weights that a module itself holds."""
    return (weight for weight in module._parameters.values() if weight is not None)


def saved_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and saved buffers, those left aside that accelerate loads for each forward."""
    weights: list[torch.Tensor | None] = []
    for module in modules_of(model):
        weights += module._parameters.values()
        left_out = module._non_persistent_buffers_set
        weights += [buffer for name, buffer in module._buffers.items() if name not in left_out]
    return [weight for weight in weights if weight is not None and not weight.is_meta]


def write_count(weight: torch.Tensor) -> tuple[int, int]:
    """A tensor's place in memory and how often it was written over; 0 where torch does not tell."""
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return weight.data_ptr() if is_plain else 0, 0 if weight.is_inference() else weight._version


def parameters_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """The parameters that a module itself holds, by name, as they are at any later time."""
    return module._parameters


CODE = ("co_code", "co_names", "co_varnames", "co_consts")
LLAMAS = LlamaRMSNorm.forward  # before anybody replaces it


def is_rms_norm(module: torch.nn.Module) -> TypeGuard[LlamaRMSNorm]:
    """True if the module's class computes `weight * (x / sqrt(mean(x ** 2) + variance_epsilon))` as Llama's does.

    Told by the code of its `forward`: a class that rounds or scales in another way is no such norm, nor is one whose
    `forward` was replaced.
    """
    forward = getattr(type(module), "forward", None)  # which modules of TorchScript lack
    return isinstance(forward, types.FunctionType) and _is_llamas(forward)


@functools.cache
def _is_llamas(forward: types.FunctionType) -> bool:
    if LLAMAS.__module__ != LlamaRMSNorm.__module__:  # somebody did
        return False
    return all(getattr(forward.__code__, name) == getattr(LLAMAS.__code__, name) for name in CODE)


TO_COPY = torch.ops.aten._to_copy.default  # what `tensor.to` calls
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What reads numbers of a tensor into Python: another call may do something else.
READING = frozenset({"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "unique", "_unique2"})


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator.

    Attributes:
        name (`str`): without its namespace and overload.
        decides (`bool`): whether numbers of a tensor, or random ones, decide what happens next.
        is_empty (`bool`): whether its result holds nothing yet.
        is_constant (`bool`): whether its result is what it was given.
        changes (`bool`): whether it writes into its arguments.
    """

    name: str
    decides: bool
    is_empty: bool
    is_constant: bool
    changes: bool


def operator_of(function: Any) -> Operator:
    """Properties of an operator that a dispatch mode sees."""
    schema = function._schema
    name = schema.name.partition("::")[2].partition(".")[0]
    decides = name in READING or torch.Tag.nondeterministic_seeded in function.tags
    return Operator(name, decides, name in EMPTY, name == "lift_fresh", schema.is_mutable)


def is_elementwise(function: Any) -> bool:
    """Returns whether an operator computes each number of its result from the numbers at the same place."""
    return torch.Tag.pointwise in getattr(function, "tags", ())


def storage_of(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor as long as it lives."""
    return int(tensor.untyped_storage()._cdata)
