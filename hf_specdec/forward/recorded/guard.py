"""Notices that a model is no longer the one whose forward was recorded."""

import sys
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_specdec.common.replaced import Replacement
from hf_specdec.compat.attention import attention_functions
from hf_specdec.compat.modules import modules_of
from hf_specdec.forward.model_facts import STATE_ATTRIBUTE
from hf_specdec.kernels import cpu

MODELS = "transformers.models."
KNOWN = ("hf_specdec.", "torch.", "transformers.")  # packages whose forwards depend on modules and arguments alone


def foreign_part(model: torch.nn.Module) -> str | None:
    """Class of a module, or function that hooks one, whose code may do anything; `None` where there is none."""
    for module in modules_of(model):
        if not _is_known(type(module)):
            return type(module).__name__
        if (forward := vars(module).get("forward")) is not None and not _is_known(forward):
            return f"the forward of a {type(module).__name__}"
        if not isinstance(module._parameters, dict):  # noqa: SLF001
            return f"the table of weights of a {type(module).__name__}"
        for hook in _hooks_of(module):
            if not _is_known(hook):
                return f"a hook on {type(module).__name__}"
    return None


def tensors_of_modules(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and other tensors of all modules, each once."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules_of(model):
        for group in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001 all of torch's
            tensors |= {id(value): value for value in list(group.values()) if isinstance(value, torch.Tensor)}
    return list(tensors.values())


class Guard:
    """A model's modules as they are now: attributes, configurations, weights, hooks, and where the weights are.

    The functions that their files and transformers' attention have by name belong to them.

    A weight that changes in place stays the same; what is replaced, moved, added or switched does not. The model itself
    is not kept: it keeps the guard, and would live until Python's collector runs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        _, *self._modules = modules = modules_of(model)
        configs = {id(config): vars(config) for config in map(_config_of, modules) if config is not None}
        groups = [*_tables_of(model), *(group for module in self._modules for group in _groups_of(module))]
        self._types: list[Any] = list(map(type, modules))
        files = {cls.__module__ for cls in self._types if cls.__module__.startswith(MODELS)}
        globals_of_files = [vars(sys.modules[name]) for name in sorted(files & sys.modules.keys())]
        self._groups = (*groups, *configs.values(), *globals_of_files, *attention_functions())
        self._forwards = [(cls, cls.forward) for cls in set(self._types)]
        # Another thread may replace a forward meanwhile.
        values = [list(group.values()) for group in (_attributes_of(model), *self._groups)]
        self._values = tuple(value for value in chain.from_iterable(values) if not isinstance(value, Replacement))
        self._weights = tensors_of_modules(model)
        self._places = self._places_now()
        self._call: object = None
        self._held = False

    def holds(self, model: torch.nn.Module, call: object = None) -> bool:
        """Returns whether the model is as it was.

        Args:
            call: in which no code of the caller's runs: one look is enough while there is no other thread.
        """
        if call is None or call is not self._call or not _is_alone():
            self._call, self._held = call, self._is_same(model)
        return self._held

    def _is_same(self, model: torch.nn.Module) -> bool:
        # Forwards of this package come and go with each block.
        return (
            cpu.core.same_values((_attributes_of(model), *self._groups), self._values, Replacement)
            and [type(model), *map(type, self._modules)] == self._types
            and self._places_now() == self._places
            and all(cls.forward is forward for cls, forward in self._forwards)
        )

    def _places_now(self) -> list[tuple[Any, ...]]:
        """Addresses, strides and sizes of the weights, from which their shapes follow."""
        readers = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel)
        return [tuple(map(reader, self._weights)) for reader in readers]


def _is_alone() -> bool:
    """Returns whether no other thread runs but that of progress bars."""
    return all(
        thread is threading.current_thread() or type(thread).__module__.startswith("tqdm.")
        for thread in threading.enumerate()
    )


def _config_of(module: torch.nn.Module) -> PreTrainedConfig | None:
    config = vars(module).get("config")
    return config if isinstance(config, PreTrainedConfig) else None


def _attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Those of the model itself, without what the package keeps there."""
    return {name: value for name, value in vars(model).items() if name != STATE_ATTRIBUTE}


def _groups_of(module: torch.nn.Module) -> Iterator[dict[Any, Any]]:
    yield vars(module)
    yield from _tables_of(module)


def _tables_of(module: torch.nn.Module) -> Iterator[dict[Any, Any]]:
    yield module._parameters  # noqa: SLF001 as torch's own code reads them
    yield module._buffers  # noqa: SLF001
    yield module._modules  # noqa: SLF001
    yield module._forward_hooks  # noqa: SLF001
    yield module._forward_pre_hooks  # noqa: SLF001


def _hooks_of(module: torch.nn.Module) -> Iterator[object]:
    yield from module._forward_hooks.values()  # noqa: SLF001
    yield from module._forward_pre_hooks.values()  # noqa: SLF001


def _is_known(code: object) -> bool:
    name = str(getattr(code, "__module__", None) or type(code).__module__)
    return name.startswith(KNOWN)
