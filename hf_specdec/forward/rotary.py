"""Rotary frequencies that depend on the length of the text: each token of a forward gets those of its own step.

A dynamic NTK or long-rope module takes one set of frequencies for a whole forward, by its last position. Plain
generation computes one token a forward, so that a token's frequencies follow from the length of the text at that step.
Hooks on these modules, there for the length of one forward, do the same for forwards of several tokens.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from hf_specdec.common.temporary_hooks import temporary_hooks
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.rotary import rotary_grows, rotary_state, rotary_switches
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.model_facts import ModelFacts

_lengths: ContextVar[torch.Tensor | None] = ContextVar("hf_specdec_lengths", default=None)


class RotaryFrequencies:
    """The rotary modules of one model whose frequencies depend on the length of the text.

    Attributes:
        switch (`int`): texts of at most this length have the original frequencies everywhere.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)
        self._arguments = [_argument_names(module) for module in self.modules]
        self.switch = min(length for module in modules for length in rotary_switches(module).values())

    @contextlib.contextmanager
    def applied(self, lengths: torch.Tensor | None) -> Iterator[None]:
        """Inside, a forward of this thread computes tokens at whose steps the text has these lengths, `(batch, T)`.

        The modules remember the longest text that they have seen; they are left as they were.
        """
        if lengths is None or int(lengths.max()) <= self.switch:
            yield
            return
        states = [rotary_state(module) for module in self.modules]
        hooks = [_Hook(lengths, *known) for known in zip(states, self._arguments, strict=True)]
        token = _lengths.set(lengths)
        try:
            with temporary_hooks(after=zip(self.modules, hooks, strict=True)):
                yield
        finally:
            _lengths.reset(token)
            for module, state in zip(self.modules, states, strict=True):
                _restore(module, state)

    def finish(self, length: int, dtype: torch.dtype) -> None:
        """Let the modules remember a text of this length, as plain generation leaves them."""
        if length <= self.switch:
            return
        for module in self.modules:
            device = next(iter(module.buffers())).device
            positions = torch.tensor([[length - 1]], device=device)
            for layer_type in rotary_switches(module):
                named = {} if layer_type is None else {"layer_type": layer_type}
                module.forward(torch.empty(0, dtype=dtype, device=device), positions, **named)


class _Hook:
    """Replaces what one module computes for a forward of several tokens.

    Args:
        lengths: `(batch, T)`: of the text at each token's step.
        state: what the module remembers of earlier texts.
        names: of the module's arguments, in order.
    """

    def __init__(self, lengths: torch.Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        self.lengths, self.state, self.names = lengths, state, names

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The module's output, `(batch, T, ...)` or a tuple of such, each token by the length at its step."""
        if _lengths.get() is not self.lengths:
            return output  # a forward of another thread
        named = dict(zip(self.names, args, strict=False)) | kwargs
        switch = rotary_switches(module).get(named.get("layer_type"))
        if switch is None:
            return output
        positions = named["position_ids"]
        lengths = self.lengths[: len(positions)].expand(positions.shape) if positions.ndim == 2 else None
        tensors = output if isinstance(output, tuple) else (output,)
        if lengths is None or any(tensor.shape[:2] != positions.shape for tensor in tensors):
            raise UnsupportedModelError("Its rotary frequencies follow the text's length in an unknown shape.")
        found = [tensor.clone() for tensor in tensors]
        groups = lengths.clamp(min=switch) if rotary_grows(module, named.get("layer_type")) else lengths > switch
        for group in sorted(set(groups.flatten().tolist())):
            chosen = groups == group  # (batch, T)
            longest = int(lengths[chosen].max())
            where = chosen.to(positions.device)
            asked = torch.cat([positions[where], positions.new_tensor([longest - 1])])[None]  # (1, tokens + 1)
            _restore(module, self.state)
            computed = module.forward(**(named | {"position_ids": asked}))
            for tensor, new in zip(found, computed if isinstance(computed, tuple) else (computed,), strict=True):
                tensor[where] = new[0, :-1]
        return tuple(found) if isinstance(output, tuple) else found[0]


def rotary_of(model: torch.nn.Module, facts: ModelFacts | None = None) -> RotaryFrequencies | None:
    """The rotary modules whose frequencies depend on the length of the text, or `None` where there are none.

    Args:
        facts: what is known of the model's structure: which modules are rotary. How they compute may change.
    """
    modules = [module for module in (facts or ModelFacts()).of(_rotary_modules, model) if rotary_switches(module)]
    return RotaryFrequencies(modules) if modules else None


def _rotary_modules(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    return tuple(module for module in modules_of(model) if "rope_type" in vars(module))


def _argument_names(module: torch.nn.Module) -> list[str]:
    """Argument names of the module's forward, in order."""
    return [name for name in inspect.signature(module.forward).parameters if name != "self"]


def _restore(module: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, value)
