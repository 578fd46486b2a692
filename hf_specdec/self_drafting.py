"""A draft model out of the target itself: its first layers, its final norm and its head, without a weight of its own.

The copy shares every parameter, buffer and layer with the model; what is copied are the few modules that hold the list
of layers, and the configuration. Knows nothing of drafting. A model trained to leave early drafts well this way
(https://arxiv.org/abs/2404.16710); any other at least runs.

    draft = hf_specdec.self_draft(model, layers=4)
    model.generate(**inputs, spec_method="draft_model", assistant_model=draft)
"""

import copy
import functools
import types
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.api import disable
from hf_specdec.errors import ConfigError, UnsupportedModelError

__all__ = ["self_draft"]

Module = TypeVar("Module", bound=torch.nn.Module)


def self_draft(model: Any, *, layers: int) -> PreTrainedModel:
    """The model cut after its first `layers` layers, to be used as `assistant_model`; the model stays as it is.

    Args:
        model: a decoder-only transformers model; PEFT-wrapped and compiled ones too.
        layers (`int`): layers that the draft keeps, at least 1 and fewer than the model has.

    Raises:
        ConfigError: `layers` is out of range.
        UnsupportedModelError: the model's layers cannot be told from its other parts.
    """
    inner = compat.generation_model(model)
    if inner.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has an encoder, and `self_draft` cuts decoder-only models. "
            "Pass a smaller model of the same kind as the draft."
        )
    total = getattr(compat.text_config(inner.config), "num_hidden_layers", None)
    path = _path_to_layers(inner, total)
    most = len(inner.get_submodule(path)) - 1
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= most:
        rule, remedy = f"must be a whole number from 1 to {most}", "A quarter of the model's layers is a start."
        raise ConfigError("layers", rule, layers, remedy)
    config = _cut_config(inner.config, layers)
    draft = _copies_along(inner, path.split("."), layers, _replacements(inner.config, config))
    draft.config, draft.generation_config = config, copy.deepcopy(inner.generation_config)
    disable(draft)  # what was enabled on the model belongs to the model
    return draft


def _path_to_layers(model: PreTrainedModel, total: int | None) -> str:
    """Dotted name of the decoder's list of layers: the outermost `ModuleList` of their number."""
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
            f"{type(model).__name__} has {which} of {total} layers, so `self_draft` cannot tell where to cut. "
            "Pass a smaller model with the same tokenizer as the draft."
        )
    return outermost[0]


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


def _copies_along(module: Module, names: list[str], layers: int, configs: dict[int, Any]) -> Module:
    """A copy of `module` that shares everything but the way to the list of layers, and a shorter list there."""
    twin = _shallow_copy(module)
    if id(getattr(module, "config", None)) in configs:
        twin.config = configs[id(module.config)]
    name, *rest = names
    below = module.get_submodule(name)
    if rest:
        replaced: torch.nn.Module = _copies_along(below, rest, layers, configs)
    else:
        assert isinstance(below, torch.nn.ModuleList)
        replaced = torch.nn.ModuleList(list(below)[:layers])
        replaced.training = below.training
    twin.add_module(name, replaced)
    return twin


def _shallow_copy(module: Module) -> Module:
    """Another module with the same parts; bound methods kept on the instance, such as accelerate's, are bound anew."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
        elif isinstance(value, types.MethodType) and value.__self__ is module:
            vars(twin)[name] = types.MethodType(value.__func__, twin)
        elif isinstance(value, functools.partial) and module in value.args:
            arguments = [twin if argument is module else argument for argument in value.args]
            bound = functools.partial(value.func, *arguments, **value.keywords)
            vars(twin)[name] = functools.update_wrapper(bound, value)
    return twin


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


def _replacements(config: Any, cut: Any) -> dict[int, Any]:
    """The cut configuration for the whole one, part by part, by the identity of the parts."""
    return {id(config): cut, id(compat.text_config(config)): compat.text_config(cut)}
