"""Copies of a model that share every weight with it and differ in a few modules: its first layers, and the others."""

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import UnsupportedModelError

__all__ = ["cut_after", "layers_of", "path_to_layers", "shallow_copy", "with_modules"]

Module = TypeVar("Module", bound=torch.nn.Module)


def path_to_layers(model: PreTrainedModel) -> str:
    """Dotted name of the decoder's list of layers: the outermost `ModuleList` of their number.

    Raises:
        UnsupportedModelError: there is none, or there are several.
    """
    total = getattr(compat.text_config(model.config), "num_hidden_layers", None)
    decoder = model.get_decoder()
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == total and _is_within(model, name, decoder)
    ]
    depth = min((name.count(".") for name in found), default=0)
    outermost = [name for name in found if name.count(".") == depth]
    if len(outermost) != 1:
        which = "no list" if not outermost else f"several lists ({', '.join(outermost)})"
        raise UnsupportedModelError(
            f"{type(model).__name__} has {which} of {total} layers, so that it is unclear where to cut it. "
            "Pass a smaller model with the same tokenizer as the draft."
        )
    return outermost[0]


def layers_of(model: PreTrainedModel, path: str) -> torch.nn.ModuleList:
    """The list of layers at `path`."""
    layers = model.get_submodule(path)
    assert isinstance(layers, torch.nn.ModuleList)
    return layers


def cut_after(model: PreTrainedModel, path: str, layers: torch.nn.ModuleList) -> PreTrainedModel:
    """A copy of `model` with `layers` in place of its list at `path`, and a configuration of as many layers."""
    config = _cut_config(model.config, len(layers))
    configs = {id(model.config): config, id(compat.text_config(model.config)): compat.text_config(config)}
    cut = with_modules(model, {path: layers}, configs)
    cut.config, cut.generation_config = config, copy.deepcopy(model.generation_config)
    return cut


def with_modules(
    module: Module, replacements: Mapping[str, torch.nn.Module], configs: Mapping[int, Any] | None = None
) -> Module:
    """A copy of `module` that shares everything but the ways to `replacements`, and holds those.

    Args:
        replacements: the new modules by their dotted names.
        configs: configurations that the copies get in place of their own, by the identity of these.
    """
    twin = shallow_copy(module)
    if id(getattr(module, "config", None)) in (configs or {}):
        twin.config = (configs or {})[id(module.config)]
    below: dict[str, dict[str, torch.nn.Module]] = {}
    for path, new in replacements.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = new
    for name, inside in below.items():
        new = inside[""] if "" in inside else with_modules(module.get_submodule(name), inside, configs)
        twin.add_module(name, new)
    return twin


def shallow_copy(module: Module) -> Module:
    """Another module with the same parts; methods kept on the instance, such as accelerate's, are bound anew.

    Compiled ones are bound as they were before `torch.compile`.
    """
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
        else:
            vars(twin)[name] = _rebound(value, module, twin)
    return twin


def _rebound(value: Any, module: torch.nn.Module, twin: torch.nn.Module) -> Any:
    """What `value`, an attribute of `module`, is for `twin`."""
    method = compat.uncompiled(value)
    if isinstance(method, types.MethodType) and method.__self__ is module:
        return types.MethodType(method.__func__, twin)
    if isinstance(method, functools.partial) and module in method.args:
        arguments = [twin if argument is module else argument for argument in method.args]
        bound = functools.partial(method.func, *arguments, **method.keywords)
        return functools.update_wrapper(bound, method)
    return value


def _is_within(model: torch.nn.Module, name: str, decoder: Any) -> bool:
    """Whether the module called `name` lies inside `decoder`, where the model names one."""
    if not isinstance(decoder, torch.nn.Module) or decoder is model:
        return True
    return any(module is decoder for module in _modules_along(model, name.split(".")))


def _modules_along(model: torch.nn.Module, names: list[str]) -> list[torch.nn.Module]:
    """The modules on the way down, the first and the last one left out."""
    found, module = [], model
    for name in names[:-1]:
        module = module.get_submodule(name)
        found.append(module)
    return found


def _cut_config(config: Any, layers: int) -> Any:
    """A copy of the configuration for the first `layers` layers; lists with an entry a layer are cut along."""
    cut = copy.deepcopy(config)
    text = compat.text_config(cut)
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:layers])
    shared = getattr(text, "num_kv_shared_layers", None)  # the last ones reuse keys and values of those before
    if shared:
        text.num_kv_shared_layers = max(0, layers - (total - shared))
    text.num_hidden_layers = layers
    return cut
