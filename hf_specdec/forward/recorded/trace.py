"""Records one forward of a model: its operations in order, with the memory that each reads and writes.

A mode of torch sees the operations, and the kernels of the core report theirs. What depends on the number of cached
tokens, the cache's columns and the masks, may only reach attention; the rest has the same shapes in every forward of
as many tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_specdec.compat.modules import Operator, TorchDispatchMode, operator_of, storage_of
from hf_specdec.forward.recorded.states import Joined, StateFunction

STATES = "states"
READERS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class NotRecordable(Exception):
    """A forward does what a record cannot repeat; says what."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's place in memory.

    Attributes:
        memory (`int`): number of the storage it is in.
        dtype, shape, stride, offset: as of the tensor.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Ref(int):
    """Number of a view among those of a record."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Columns:
    """Keys or values of a layer of the cache, up to the last column of the forward.

    Attributes:
        layer (`int`): number of the layer.
        is_value (`bool`): whether these are the values.
    """

    layer: int
    is_value: bool


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask among the forward's arguments; `path` leads to it there."""

    path: str


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        function: the operator of torch, a function, or the name of what the core computes.
        args, kwargs: its arguments, tensors as `Ref`, `Columns` or `Mask`.
        results: what it writes, one for each tensor that it returns.
        is_in_place (`bool`): whether that is memory of its arguments.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref, ...]
    is_in_place: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """A storage that a forward uses.

    Attributes:
        size (`int`): bytes.
        tensor: of the model, or a constant; `None` for arguments and what the forward itself computes.
        argument (`str | None`): path of the argument that it holds.
    """

    size: int
    tensor: torch.Tensor | None = None
    argument: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded forward.

    Attributes:
        tokens (`int`): of each row, or of all packed rows together.
        steps, views, memories: as of `Trace`.
        arguments: views of the arguments, by path.
        outputs: what the forward returned, tensors as `Ref`.
    """

    tokens: int
    steps: list[Step]
    views: list[View]
    memories: list[Memory]
    arguments: dict[str, Ref]
    outputs: Any


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes notes of a forward.

    Args:
        weights: tensors of the model's modules.
        arguments: tensors that the forward gets, by path.
        masks: those of them that are masks.
        layers: of the cache.

    Attributes:
        steps (`list[Step]`): the operations so far.
        views (`list[View]`): the tensors that they read and write.
        memories (`list[Memory]`): the storages of these.
    """

    def __init__(
        self,
        weights: list[torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        masks: Mapping[str, torch.Tensor],
        layers: Sequence[object],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.views: list[View] = []
        self.memories: list[Memory] = []
        self._operators: dict[Any, Operator] = {}
        self._refs: dict[View, Ref] = {}
        self._of_tensors: dict[int, Ref | Columns | Mask | Joined] = {}  # by identity; all of them are kept meanwhile
        self._kept: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # of memories, by storage
        self._moving: dict[tuple[Any, ...], Columns | Mask | Joined] = {}
        self._moving_storages: set[int] = set()
        self._paused = False
        self._layers = {id(layer): number for number, layer in enumerate(layers)}
        for weight in weights:
            self._add_memory(weight, weight, None)
        self.arguments: dict[str, Ref] = {}
        for path, tensor in arguments.items():
            self._add_memory(tensor, None, path)
            self.arguments[path] = self.ref(tensor)
        for path, tensor in masks.items():
            self._add_moving(tensor, Mask(path))
            if tensor.ndim != 4:  # the core's attention reads none
                del self._moving[_place(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation and note it."""
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._note(func, args, kwargs or {}, result)
        return result

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """A block whose operations of torch are noted, and in which reading numbers into Python is an error."""
        with self, _NoReading(self):
            yield

    @property
    def is_paused(self) -> bool:
        """Returns whether nothing is noted now."""
        return self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See `Recorder`."""
        outer, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = outer

    def core(self, name: str, tensors: tuple[torch.Tensor | None, ...], numbers: Mapping[str, Any]) -> None:
        """See `Recorder`."""
        if not self._paused:
            *read, result = tensors
            self.steps.append(Step(name, self._tree(tuple(read), name), dict(numbers), (self._written(result),)))

    def call(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """See `Recorder`."""
        if not self._paused:
            self.steps.append(Step(function, self._tree(args, "a function"), kwargs, (self._written(result),)))

    def update(self, layer: int, states: tuple[torch.Tensor, ...], columns: tuple[torch.Tensor, ...]) -> None:
        """See `Recorder`."""
        self.steps.append(Step("update", self._tree(states, "the cache"), {"layer": layer}, ()))
        for is_value, tensor in enumerate(columns):
            self._add_moving(tensor, Columns(layer, bool(is_value)))

    def states(
        self,
        layer: Any,
        function: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> None:
        """See `Recorder`."""
        read = self._tree(args, STATES), {name: self._tree(value, STATES) for name, value in kwargs.items()}
        if result is layer.joined:
            self._add_moving(result, Joined())
            written: tuple[Ref, ...] = ()
        else:
            written = (self._written(result),)
        self.steps.append(Step(StateFunction(function, self._layers[id(layer)]), *read, written))

    def record(self, tokens: int, outputs: Any) -> Record:
        """The record of a forward of so many tokens that returned `outputs`, tensors as `ref` has them."""
        return Record(tokens, self.steps, self.views, self.memories, self.arguments, outputs)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The view of a weight or argument, or of what the forward has computed.

        Raises:
            NotRecordable: the forward has it from elsewhere.
        """
        storage = storage_of(tensor)
        if storage in self._moving_storages:
            raise NotRecordable("it returns a part of the cache or of a mask")
        if (number := self._numbers.get(storage)) is None:
            raise NotRecordable("its forward reads a tensor that is no weight, argument or result of an operation")
        view = View(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        if (ref := self._refs.get(view)) is None:
            ref = self._refs[view] = Ref(len(self.views))
            self.views.append(view)
        return ref

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if (operator := self._operators.get(func)) is None:
            operator = self._operators[func] = operator_of(func)
        results = result if isinstance(result, list | tuple) else (result,)
        if operator.decides or not all(isinstance(tensor, torch.Tensor) for tensor in results):
            raise NotRecordable(f"its forward reads numbers of a tensor ({operator.name})")
        if operator.changes:
            for tensor in results:
                self._of_tensors.pop(id(tensor), None)  # its shape may have changed
        elif operator.is_empty or operator.is_constant:
            for tensor in results:
                self._written(tensor, tensor if operator.is_constant else None)
            return
        elif all(storage_of(tensor) in self._numbers for tensor in results):
            return  # views
        elif all(_place(tensor) in self._moving for tensor in results):
            return  # all of a mask
        read = self._tree(args, operator.name)
        kwargs = {name: self._tree(value, operator.name) for name, value in kwargs.items()}
        if operator.changes:
            self._check_changes(results)
        written = tuple(self._written(tensor) for tensor in results)
        self.steps.append(Step(func, read, kwargs, written, operator.changes))

    def _check_changes(self, results: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        """Raise if an operation changes what the next forward reads."""
        for tensor in results:
            number = self._numbers.get(storage_of(tensor))
            if number is None or self.memories[number].tensor is not None:
                raise NotRecordable("its forward changes a tensor of the model")

    def _tree(self, value: Any, name: str) -> Any:
        """Arguments with tensors as a step has them."""
        if isinstance(value, torch.Tensor):
            if (known := self._of_tensors.get(id(value))) is None or type(known) is not Ref:
                known = self._read(value, name)
            return known
        if type(value) in (list, tuple):
            return type(value)([self._tree(item, name) for item in value])
        return value

    def _read(self, tensor: torch.Tensor, name: str) -> Ref | Columns | Mask | Joined:
        if storage_of(tensor) in self._moving_storages:
            moving = self._moving.get(_place(tensor))
            if moving is None or name != (STATES if isinstance(moving, Joined) else "attention"):
                raise NotRecordable(f"{name} reads the cache or a mask")
            return moving
        ref = self.ref(tensor)
        self._kept.append(tensor)
        self._of_tensors[id(tensor)] = ref
        return ref

    def _written(self, tensor: torch.Tensor | None, constant: torch.Tensor | None = None) -> Ref:
        """The view of a result."""
        assert tensor is not None
        if storage_of(tensor) not in self._numbers:
            self._add_memory(tensor, constant, None)
        return self.ref(tensor)

    def _add_memory(self, example: torch.Tensor, tensor: torch.Tensor | None, argument: str | None) -> None:
        self._kept.append(example)
        if (storage := storage_of(example)) not in self._numbers:
            self._numbers[storage] = len(self.memories)
            self.memories.append(Memory(example.untyped_storage().nbytes(), tensor, argument))

    def _add_moving(self, tensor: torch.Tensor, name: Columns | Mask | Joined) -> None:
        self._moving[_place(tensor)] = name
        self._moving_storages.add(storage_of(tensor))
        self._kept.append(tensor)


class _NoReading(TorchFunctionMode):
    """Raises where a forward reads a tensor's numbers by methods that no dispatch mode sees."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a function."""
        if (name := getattr(func, "__name__", "")) in READERS and not self._trace.is_paused:
            raise NotRecordable(f"its forward reads numbers of a tensor ({name})")
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
