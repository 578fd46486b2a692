"""Hooks that PEFT sets for one call of its wrapper's `generate`, to hand the layers an argument.

Names                              Why
`_adapter_names_pre_forward_hook`  `adapter_names`: an adapter for each row of the call
`_alora_offsets_pre_forward_hook`  aLoRA's adapters act on the last so many tokens of each forward
`PolyModel._register_pre_hooks`    `task_ids`: a task for each row of the call; a hook made anew for each call

Hooks of Poly and others stay in place in probes: its layers compute nothing without them.
"""

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from hf_specdec.compat.modules import modules_of

TASKS = "PolyModel._register_pre_hooks.<locals>.pre_hook"
ROW_ADAPTERS, ADAPTER_OFFSETS = "_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"


def is_adapter_hook(hook: Any) -> bool:
    """True if a hook of PEFT's says which adapters act in one call, instead of those that are active in the model."""
    return _name(hook) in (ROW_ADAPTERS, ADAPTER_OFFSETS)


def rows_of_tasks(hook: Any) -> int | None:
    """Rows of the call for which a hook hands Poly's layers their `task_ids`; `None` for every other hook."""
    if not _name(hook) or getattr(hook, "__qualname__", "") != TASKS:
        return None
    (tasks,) = (cell.cell_contents for cell in hook.__closure__)
    return len(tasks)


def has_row_hooks(model: torch.nn.Module) -> bool:
    """True if PEFT has set hooks for the rows of the present call: forwards take all of these, in their order."""
    return any(_name(hook) for hooks in _all_hooks(model) for hook in list(hooks.values()))


def places_adapters(model: torch.nn.Module) -> bool:
    """Returns whether adapters of the present call act on the last tokens of a forward, however many it computes."""
    return any(
        _name(hook) == ADAPTER_OFFSETS and any(hook.keywords["alora_offsets"] or ())
        for hooks in _all_hooks(model)
        for hook in list(hooks.values())
    )


@contextlib.contextmanager
def without_adapter_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Compute for a while with the adapters that are active in the model, for any number of rows."""
    taken = [(hooks, number) for hooks in _all_hooks(model) for number in list(hooks) if is_adapter_hook(hooks[number])]
    kept = [(hooks, number, hooks.pop(number)) for hooks, number in taken]
    try:
        yield
    finally:
        for hooks, number, hook in kept:
            hooks[number] = hook


def _all_hooks(model: torch.nn.Module) -> Iterator[MutableMapping[int, Any]]:
    return (module._forward_pre_hooks for module in modules_of(model) if module._forward_pre_hooks)


def _name(hook: Any) -> str:
    """Name of a function of PEFT's, perhaps in a `functools.partial`; empty for any other."""
    function = getattr(hook, "func", hook)
    return function.__name__ if str(getattr(function, "__module__", "")).startswith("peft.") else ""
