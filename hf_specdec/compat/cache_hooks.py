"""Hooks that may change the cache while a forward runs, as those that compress or evict keys and values do.

Names                              Why
`_forward_hooks_with_kwargs` and the like
                                   torch gives hooks the named arguments of a forward, a cache among them, if they ask
`__closure__`                      a hook may hold the cache itself
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import Cache, PreTrainedModel

from hf_specdec.compat.caches import CACHE_NAMES, OLD_NAMES
from hf_specdec.compat.fingerprint import is_harmless
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.peft_hooks import is_adapter_hook

HOOKS = {"_forward_hooks": "_forward_hooks_with_kwargs", "_forward_pre_hooks": "_forward_pre_hooks_with_kwargs"}
ARGUMENTS = frozenset({*CACHE_NAMES, *OLD_NAMES, "past_key_value", "layer_past"})
FIRST = 2  # arguments that models pass by position: the hidden states and, as GPT-2's blocks, a cache after them


def hook_with_cache(model: PreTrainedModel) -> str | None:
    """Name of a hook that gets a cache or holds one, with the class of its module; `None` without any."""
    for module in modules_of(model):
        for hook, is_given in _hooks_of(module):
            if is_given or any(isinstance(one, Cache) for one in _held_by(hook)):
                named = hook.func if isinstance(hook, functools.partial) else hook
                return f"{getattr(named, '__name__', type(named).__name__)} of {type(module).__name__}"
    return None


def _hooks_of(module: torch.nn.Module) -> Iterator[tuple[Any, bool]]:
    """Hooks of other code, and whether each is given the module's cache; those of all modules among them."""
    for name, of_kwargs in HOOKS.items():
        own, everywhere = vars(module).get(name, {}), getattr(torch_module, f"_global{name}")
        if not own and not everywhere:
            continue
        place = _place_of_cache(type(module))
        given = {**vars(module).get(of_kwargs, {}), **getattr(torch_module, f"_global{of_kwargs}", {})}
        for number, hook in _items(everywhere, own):
            if not (is_harmless(hook) or is_adapter_hook(hook)):
                yield hook, place is not None and (number in given or place < FIRST)


def _items(*tables: Mapping[int, Any]) -> list[tuple[int, Any]]:
    return [item for table in tables for item in tuple(table.items())]


@functools.cache
def _place_of_cache(cls: type[torch.nn.Module]) -> int | None:
    """Position of the cache among the arguments of a module's forward; `None` where it takes none."""
    names = [name for name in inspect.signature(cls.forward).parameters if name != "self"]
    return next((place for place, name in enumerate(names) if name in ARGUMENTS), None)


def _held_by(hook: Any) -> Iterator[Any]:
    """Objects that a hook keeps: those of its closure, its owner and its bound arguments."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values(), *_held_by(hook.func))
        return
    function = getattr(hook, "__func__", hook)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from getattr(getattr(hook, "__self__", hook), "__dict__", {}).values()
