"""A template made ready to run for one number of tokens."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.transfer import HOST
from hf_specdec.forward.recorded.states import Joined, StateFunction
from hf_specdec.forward.recorded.template import Codes, Template, refs_of, room_of
from hf_specdec.forward.recorded.trace import Ref, Step, View
from hf_specdec.kernels import cpu

ALIGNMENT = 64  # bytes
LAYER, MASK = 9, 3  # numbers of each in their tables


@dataclass(frozen=True, slots=True)
class Constant:
    """Something among a forward's outputs that is no tensor: a cache, or nothing."""


@dataclass(slots=True)
class _Run:
    """Addresses and layers that the forward that runs now reads and writes.

    Attributes:
        tables: addresses for the core.
        layers: of the cache.
    """

    tables: tuple[int, ...] = ()
    layers: Sequence[Any] = ()

    def continued(self, step: StateFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A function of a layer of the cache, by the states that it has now; the layer keeps the tensors it gets."""
        layer = self.layers[step.layer]
        kept = [layer.joined if type(value) is Joined else _kept(value) for value in args]
        return step.function(layer, *kept, **{name: _kept(value) for name, value in kwargs.items()})


class Program:
    """Runs forwards of one number of tokens. Not shared between threads.

    Args:
        template: of these forwards.
        tokens (`int`): of each row, or of all packed rows together.
        num_threads (`int`): by how many the core computes.

    Attributes:
        num_bytes (`int`): memory of what it computes.
        num_calls (`int`): calls of the core and of torch that one run makes.
    """

    def __init__(self, template: Template, tokens: int, num_threads: int) -> None:
        self._template, self._tokens, self._threads = template, tokens, num_threads
        template.check(tokens)
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in template.sizes(tokens)]
        self._arena = torch.empty(sum(sizes) + ALIGNMENT, dtype=torch.uint8, device=HOST)
        starts = np.cumsum([-self._arena.data_ptr() % ALIGNMENT, *sizes[:-1]])
        self._starts: list[int] = starts.tolist()
        self._bases = starts + self._arena.data_ptr()
        self._bases[0] = 0
        parts = template.parts(tokens)
        self._room_size = max((room_of(part) for part in parts if isinstance(part, Codes)), default=0)
        self._room = torch.empty(max(self._room_size * num_threads, 1), dtype=torch.float32, device=HOST)
        self._layers = np.zeros((max(template.layers, default=0) + 1, LAYER), dtype=np.int64)
        self._masks = np.zeros((max(len(template.masks), 1), MASK), dtype=np.int64)
        self._inputs = [(path, self._tensor(ref)) for path, ref in template.arguments.items() if self._is_used(ref)]
        self._fresh = [
            (slot, (size + 7) // 8)
            for slot, memory in template.fresh.items()
            for size in [template.sizes(tokens)[slot]]
        ]
        self._memories = {memory: slot for slot, memory in template.fresh.items()}
        self._outputs = {ref: template.view(ref, tokens) for ref in refs_of(template.outputs)}
        self._returned: dict[int, torch.Tensor] = {}
        self._run = _Run()
        self._counters: list[np.ndarray[Any, Any]] = []
        self._parts = [self._call_of(part) for part in parts]
        self.num_bytes, self.num_calls = self._arena.nbytes, len(parts)

    def run(
        self,
        arguments: Mapping[str, torch.Tensor],
        masks: Mapping[str, torch.Tensor],
        cache: SpecCache,
        packed: PackedRows | None,
    ) -> Any:
        """The outputs of a forward with these arguments, whose keys and values are written into the cache."""
        for path, tensor in self._inputs:
            tensor.copy_(arguments[path])
        for slot, size in self._fresh:
            memory = self._returned[slot] = torch.empty(size, dtype=torch.int64, device=HOST)
            self._bases[slot] = memory.data_ptr()
        self._point_at(cache, masks, packed)
        self._run.layers = cache.layers
        for part in self._parts:
            part()
        self._run.layers = ()
        return _rebuilt(self._template.outputs, self._output)

    def _point_at(self, cache: SpecCache, masks: Mapping[str, torch.Tensor], packed: PackedRows | None) -> None:
        """Have the core read and write where this forward's masks and columns are."""
        for number, path in enumerate(self._template.masks):
            mask = masks.get(path)
            strides = (0, 0) if mask is None else (mask.stride(0) * (len(mask) > 1), mask.stride(2))
            self._masks[number] = (0 if mask is None else mask.data_ptr(), *strides)
        for number in self._template.layers:
            layer = cache.layers[number]
            keys, values = layer.keys, layer.values
            strides = (*keys.stride()[:2], *values.stride()[:3])
            ends = (layer.length - layer.offset, layer.offset)
            self._layers[number] = (keys.data_ptr(), values.data_ptr(), *strides, *ends)
        bounds, width = (0, 0) if packed is None else (packed.bounds.data_ptr(), packed.width)
        tables = (self._bases, self._layers, self._masks)
        places = tuple(tensor.data_ptr() for tensor in cache.places)
        self._run.tables = (*(table.ctypes.data for table in tables), *places, bounds, width)

    def _call_of(self, part: Codes | Step) -> Callable[[], object]:
        """Runs a part."""
        if isinstance(part, Step):
            return self._torchs(part)
        counters = np.zeros(part.count, dtype=np.int64)
        self._counters += [part.numbers, counters]
        head = (part.numbers.ctypes.data, len(part.numbers))
        tail = (counters.ctypes.data, part.count, self._room.data_ptr(), self._room_size, self._threads)
        team, team_size = (0, 0) if self._threads == 1 else (cpu.team(), cpu.team_size())
        run = self._run  # a part that led back to the program would keep its memory until Python's collector runs

        def replay() -> None:
            bases, layers, masks, rows, columns, packed, width = run.tables
            cpu.core.replay(*head, bases, layers, masks, rows, columns, packed, width, *tail, team, team_size)

        return replay

    def _torchs(self, step: Step) -> Callable[[], object]:
        """A call of torch, whose results are copied to where later steps read them."""
        args, kwargs = _rebuilt(step.args, self._tensor), _rebuilt(step.kwargs, self._tensor)
        if isinstance(step.function, StateFunction):
            computed = functools.partial(_rebuilt, tensor=self._computed)
            function = functools.partial(self._run.continued, step.function, computed(step.args), computed(step.kwargs))
        else:
            function = functools.partial(step.function, *args, **kwargs)
        if step.is_in_place:
            return function
        copies = [self._tensor(ref).copy_ for ref in step.results]
        if not copies:
            return function
        if len(copies) == 1:
            (copy,) = copies
            return lambda: copy(function())

        def several() -> None:
            for copy, result in zip(copies, function(), strict=True):
                copy(result)

        return several

    def _computed(self, ref: Ref) -> Any:
        """A weight, or the function that copies what the forward has computed."""
        return self._tensor(ref).clone if self._is_used(ref) else self._tensor(ref)

    def _is_used(self, ref: Ref) -> bool:
        return self._template.view(ref, self._tokens).memory in self._template.slots

    def _output(self, ref: Ref) -> torch.Tensor:
        """A tensor of the outputs, that no later run writes into."""
        view = self._outputs[ref]
        if (slot := self._memories.get(view.memory)) is None:
            return self._tensor(ref).clone()
        return _placed(view, self._returned[slot], 0)

    def _tensor(self, ref: Ref) -> torch.Tensor:
        view = self._template.view(ref, self._tokens)
        if (slot := self._template.slots.get(view.memory)) is not None:
            return _placed(view, self._arena, self._starts[slot])
        tensor = self._template.memories[view.memory].tensor
        assert tensor is not None
        return _placed(view, tensor, 0)


def _kept(value: Any) -> Any:
    """The same in memory that no later step writes into."""
    return value() if callable(value) and not isinstance(value, torch.Tensor) else value


def _placed(view: View, memory: torch.Tensor, start: int) -> torch.Tensor:
    """The tensor that a view says, in the storage of `memory` from byte `start` on."""
    offset = start // view.dtype.itemsize + view.offset
    return torch.empty(0, dtype=view.dtype, device=HOST).set_(memory.untyped_storage(), offset, view.shape, view.stride)


def _rebuilt(value: Any, tensor: Callable[[Ref], torch.Tensor]) -> Any:
    """The same with tensors in the place of references."""
    if type(value) is Ref:
        return tensor(value)
    if type(value) is Constant:
        return None
    if isinstance(value, dict):
        return {key: _rebuilt(item, tensor) for key, item in value.items()}
    return type(value)([_rebuilt(item, tensor) for item in value]) if isinstance(value, list | tuple) else value
