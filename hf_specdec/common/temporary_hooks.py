"""Hooks that are on a model's modules for the length of a block, also where an interrupt comes between any two lines.

Hooks that such an interrupt has left do nothing, are left out where the model is pickled, and go with the next block.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Hooks = Iterable[tuple[torch.nn.Module, Callable[..., Any]]]
_register_lock = threading.Lock()  # torch numbers hooks without one
KEPT_IN = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class _Block:
    """Returns whether the block has ended."""

    is_over = False


class _TemporaryHook:
    """Calls a function until its block has ended."""

    def __init__(self, block: _Block, function: Callable[..., Any]) -> None:
        self._block, self._function = block, function

    def __call__(self, *arguments: Any) -> Any:
        return None if self.is_over else self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        over = _Block()
        over.is_over = True
        return _TemporaryHook, (over, _nothing)

    @property
    def is_over(self) -> bool:
        return self._block.is_over


@contextlib.contextmanager
def temporary_hooks(*, before: Hooks = (), after: Hooks = ()) -> Iterator[None]:
    """Inside, functions are called with keyword arguments before and after modules' forwards, as torch calls hooks."""
    before, after, block = list(before), list(after), _Block()
    modules = [module for module, _ in (*before, *after)]
    try:
        with _register_lock:
            _sweep(modules)
            for module, function in before:
                module.register_forward_pre_hook(_TemporaryHook(block, function), with_kwargs=True)
            for module, function in after:
                module.register_forward_hook(_TemporaryHook(block, function), with_kwargs=True)
        yield
    finally:
        block.is_over = True
        with _register_lock:
            _sweep(modules)


def _sweep(modules: Iterable[torch.nn.Module]) -> None:
    """Remove the hooks whose blocks have ended."""
    for module in modules:
        for name, *others in KEPT_IN:
            hooks = getattr(module, name)
            for key in [key for key, hook in hooks.items() if isinstance(hook, _TemporaryHook) and hook.is_over]:
                for kept in (hooks, *(getattr(module, other) for other in others)):
                    kept.pop(key, None)


def _nothing(*arguments: Any) -> None:
    """In the place of a function that a pickled model does not take along."""
