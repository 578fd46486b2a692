"""The first layers of a model: a copy that shares every weight with it and differs in a few modules."""

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import UnsupportedModelError


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


def first_layers(model: PreTrainedModel, layers: int, path: str | None = None) -> PreTrainedModel:
    """The first `layers` layers of a model with its own norm and head; they share every weight with it.

    Args:
        path: to the list of layers, where it is known.

    Raises:
        UnsupportedModelError: as of `path_to_layers` and `check_forwards`.
    """
    path = path or path_to_layers(model)
    check_forwards(model, path)
    own = layers_of(model, path)
    first = torch.nn.ModuleList(list(own)[:layers])
    first.training = own.training
    config = _cut_config(model.config, layers)
    configs = {id(model.config): config, id(compat.text_config(model.config)): compat.text_config(config)}
    cut = _with_module(model, path, first, configs)
    assert isinstance(cut, PreTrainedModel)
    cut.config, cut.generation_config = config, copy.deepcopy(model.generation_config)
    return cut


def _with_module(
    module: torch.nn.Module, path: str, new: torch.nn.Module, configs: Mapping[int, Any]
) -> torch.nn.Module:
    """A copy of `module` that shares everything but the way to `path`, and holds `new` there.

    Args:
        configs: configurations that the copies get in place of their own, by the identity of these.
    """
    if not path:
        return new
    twin = _shallow_copy(module)
    if id(getattr(module, "config", None)) in configs:
        twin.config = configs[id(module.config)]
    name, _, rest = path.partition(".")
    twin.add_module(name, _with_module(module.get_submodule(name), rest, new, configs))
    return twin


def _shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Another module with the same parts; functions kept on the instance that call the module call the copy.

    Compiled ones are taken as they were before `torch.compile`.
    """
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
        else:
            vars(twin)[name] = _rebound(value, module, twin)
    return twin


def check_forwards(model: PreTrainedModel, path: str) -> None:
    """Refuse a model of which a copy would run the whole model.

    Raises:
        UnsupportedModelError: a module that holds the layers at `path` has a forward on the instance that reaches the
            module in another way than as a method or an argument of a partial, as accelerate's hooks do.
    """
    for module in [model, *_modules_along(model, path.split("."))]:
        forward = vars(module).get("forward")
        if forward is not None and _rebound(forward, module, torch.nn.Identity()) is forward:
            name = getattr(forward, "__qualname__", type(forward).__name__)
            raise UnsupportedModelError(
                f"{type(model).__name__} has the `forward` of its {type(module).__name__} replaced by {name!r}, so "
                "that a copy of its first layers would run all of them. Set types.MethodType(function, module) in its "
                "place, or pass a smaller model with the same tokenizer as the draft."
            )


def _rebound(value: Any, module: torch.nn.Module, twin: torch.nn.Module) -> Any:
    """Translates `value`, an attribute of `module`, for `twin`; `value` itself where it does not hold `module`."""
    if value is module:
        return twin
    function = compat.uncompiled(value)
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, twin) if function.__self__ is module else value
    if not isinstance(function, functools.partial):
        return value
    call, args = _rebound(function.func, module, twin), [_rebound(arg, module, twin) for arg in function.args]
    if call is function.func and all(a is b for a, b in zip(function.args, args, strict=True)):
        return value
    return functools.update_wrapper(functools.partial(call, *args, **function.keywords), function)


def _is_within(model: torch.nn.Module, name: str, decoder: Any) -> bool:
    """True if the module called `name` lies inside `decoder`, where the model names one."""
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
