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
            module in another way than as a method, a partial, a closure or by its defaults.
    """
    for module in [model, *_modules_along(model, path.split("."))]:
        own = vars(module).get("forward")
        if own is not None and _rebound(own, module, torch.nn.Identity()) is own:
            raise UnsupportedModelError(
                f"{type(model).__name__} has the `forward` of its {type(module).__name__} replaced by "
                f"{getattr(own, '__qualname__', type(own).__name__)!r}, so that a copy of its first layers would run "
                "all of them. Set types.MethodType(function, module) in its place, or pass a smaller model with the "
                "same tokenizer as the draft."
            )


def _rebound(value: Any, module: torch.nn.Module, twin: torch.nn.Module, within: tuple[Any, ...] = ()) -> Any:
    """Translates `value`, an attribute of `module`, for `twin`; `value` itself where it does not hold `module`.

    Args:
        within: the functions whose parts led here.
    """
    if value is module:
        return twin
    function = compat.uncompiled(value)
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, twin) if function.__self__ is module else value
    if function in within or not isinstance(function, functools.partial | types.FunctionType):
        return value
    parts = _parts_of(function)
    new = [_rebound(part, module, twin, (*within, function)) for part in parts]
    if all(a is b for a, b in zip(parts, new, strict=True)):
        return value
    return functools.update_wrapper(_assembled(function, new), function)


def _parts_of(function: functools.partial[Any] | types.FunctionType) -> list[Any]:
    """Lists what a function calls or passes on of what is known with it; see `_assembled`."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _assembled(function: functools.partial[Any] | types.FunctionType, parts: list[Any]) -> Any:
    """The function with `parts` in place of its own; cells whose content stays are shared with it."""
    if isinstance(function, functools.partial):
        count = 1 + len(function.args)
        return functools.partial(parts[0], *parts[1:count], **dict(zip(function.keywords, parts[count:], strict=True)))
    own = function.__closure__ or ()
    cells = tuple(
        cell if _content(cell) is new is not function else types.CellType(new)
        for cell, new in zip(own, parts, strict=False)
    )
    count = len(cells) + len(function.__defaults__ or ())
    defaults = tuple(parts[len(cells) : count]) or None
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    made.__kwdefaults__ = dict(zip(function.__kwdefaults__ or {}, parts[count:], strict=True))
    for cell in cells:
        if _content(cell) is function:  # it calls itself
            cell.cell_contents = made
    return made


def _content(cell: types.CellType) -> Any:
    """Content of a cell of a closure; the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


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
