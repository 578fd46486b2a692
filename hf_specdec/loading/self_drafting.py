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
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.api.enabled_model import become_plain
from hf_specdec.compat.models import generation_model, text_config, uncompiled
from hf_specdec.engine.model_state import ATTRIBUTE
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.methods.common.config import check_positive


def self_draft(model: Any, *, layers: int) -> PreTrainedModel:
    """Make a draft model of the first `layers` layers of `model`, to be passed as `assistant_model`.

    Args:
        model (`PreTrainedModel`): a decoder-only transformers model; PEFT-wrapped and compiled ones too.
        layers (`int`): layers that the draft keeps, at least 1 and fewer than the model has.

    Raises:
        ConfigError: `layers` is out of range.
        UnsupportedModelError: the model's layers cannot be told from its other parts, or a module that holds them has a
            `forward` on the instance that reaches the module in another way than as a method or an argument of a
            partial, as accelerate's hooks do.
    """
    inner = generation_model(model)
    if not isinstance(inner, PreTrainedModel):
        kind = type(inner).__name__
        raise UnsupportedModelError(
            f"`model` must be a transformers model, but is {kind}. Load it with from_pretrained."
        )
    if inner.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has an encoder, and `self_draft` cuts decoder-only models. "
            "Pass a smaller model of the same kind as the draft."
        )
    path = _path_to_layers(inner)
    whole = inner.get_submodule(path)
    assert isinstance(whole, torch.nn.ModuleList)
    check_positive("layers", layers, "A quarter of the model's layers is a start.", most=len(whole) - 1)
    first = torch.nn.ModuleList(list(whole)[:layers])
    first.training = whole.training
    draft = _with_layers(inner, path, first)
    become_plain(draft)
    vars(draft).pop(ATTRIBUTE, None)  # the model's own; hooks of the shared layers stay, too
    return draft


def _path_to_layers(model: PreTrainedModel) -> str:
    """Dotted name of the decoder's list of layers: the outermost `ModuleList` of their number."""
    total, decoder = getattr(text_config(model.config), "num_hidden_layers", None), model.get_decoder()
    inside = [decoder, model] if isinstance(decoder, torch.nn.Module) else [model]
    paths: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == total and inside[0] in _holders(model, name)
    ]
    depth = min((name.count(".") for name in paths), default=0)
    outermost = [name for name in paths if name.count(".") == depth]
    if len(outermost) != 1:
        which = "no list" if not outermost else f"several lists ({', '.join(outermost)})"
        raise UnsupportedModelError(
            f"{type(model).__name__} has {which} of {total} layers, so that it is unclear where to cut it. "
            "Pass a smaller model with the same tokenizer as the draft."
        )
    return outermost[0]


def _holders(model: PreTrainedModel, path: str) -> list[torch.nn.Module]:
    """The model and the modules on the way down to `path`, the last one left out."""
    names = path.split(".")
    return [model.get_submodule(".".join(names[:count])) for count in range(len(names))]


def _with_layers(model: PreTrainedModel, path: str, layers: torch.nn.ModuleList) -> PreTrainedModel:
    """A copy of the model that shares everything but the way to `path`, and holds `layers` there."""
    config = _cut_config(model.config, len(layers))
    configs = {id(model.config): config, id(text_config(model.config)): text_config(config)}
    part: torch.nn.Module = layers
    for module, name in reversed(list(zip(_holders(model, path), path.split("."), strict=True))):
        twin = copy.copy(module)
        for key, value in vars(module).items():
            vars(twin)[key] = copy.copy(value) if isinstance(value, dict) else _rebound(value, module, twin)
        if (forward := vars(twin).get("forward")) is not None and forward is vars(module)["forward"]:
            replaced_by = getattr(forward, "__qualname__", type(forward).__name__)
            raise UnsupportedModelError(
                f"{type(model).__name__} has the `forward` of its {type(module).__name__} replaced by {replaced_by!r}, "
                "so that a copy of its first layers would run all of them. Set types.MethodType(function, module) in "
                "its place, or pass a smaller model with the same tokenizer as the draft."
            )
        if id(getattr(module, "config", None)) in configs:
            twin.config = configs[id(module.config)]
        twin.add_module(name, part)
        part = twin
    assert isinstance(part, PreTrainedModel)
    part.config, part.generation_config = config, copy.deepcopy(model.generation_config)
    return part


def _rebound(value: Any, module: torch.nn.Module, twin: torch.nn.Module) -> Any:
    """Translates `value`, an attribute of `module`, for `twin`: a function that calls the module calls the copy.

    Compiled functions are taken as they were before `torch.compile`.
    """
    if value is module:
        return twin
    function = uncompiled(value)
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, twin) if function.__self__ is module else value
    if not isinstance(function, functools.partial):
        return value
    call, args = _rebound(function.func, module, twin), [_rebound(arg, module, twin) for arg in function.args]
    if call is function.func and all(a is b for a, b in zip(function.args, args, strict=True)):
        return value
    return functools.update_wrapper(functools.partial(call, *args, **function.keywords), function)


def _cut_config(config: Any, layers: int) -> Any:
    """A copy of the configuration for the first `layers` layers; lists with an entry a layer are cut along."""
    cut = copy.deepcopy(config)
    text = text_config(cut)
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:layers])
    shared = getattr(text, "num_kv_shared_layers", None)  # the last ones reuse keys and values of those before
    if shared:
        text.num_kv_shared_layers = max(0, layers - (total - shared))
    text.num_hidden_layers = layers
    return cut
