"""One record for every number of tokens: what differs between two recorded forwards grows with their tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.forward.recorded.instructions import COUNT, NUM_IN, PRODUCT, Code, Compiler
from hf_specdec.forward.recorded.trace import Memory, NotRecordable, Record, Ref, Step, View

Numbers = npt.NDArray[np.int64]
OTHERWISE = "its forward does something else at another length"


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer `start + slope * tokens`."""

    start: int
    slope: int


@dataclass(frozen=True, slots=True)
class Codes:
    """Instructions that the core follows in one call.

    Attributes:
        numbers (`(N,)`): one instruction after the other.
        count (`int`): how many.
    """

    numbers: Numbers
    count: int


Part = Codes | Step


class Template:
    """Common parts of two records, ready to run with any number of tokens.

    Args:
        first, second: of different numbers of tokens; of the same one for a template of that number alone.
        masks: paths of the masks among the arguments.

    Attributes:
        layers (`list[int]`): of the cache, that the forward writes.
        num_slots (`int`): places in memory that it uses, one after the other.
        fresh (`dict[int, int]`): memories whose slots have new memory in each run, as they are returned.

    Raises:
        NotRecordable: they do not do the same, or not by the number of tokens.
    """

    def __init__(self, first: Record, second: Record, masks: Sequence[str]) -> None:
        self._by, self.masks = (first.tokens, second.tokens), list(masks)
        if len(first.steps) != len(second.steps) or len(first.memories) != len(second.memories):
            raise NotRecordable(OTHERWISE)
        if len(first.views) != len(second.views) or first.arguments != second.arguments:
            raise NotRecordable(OTHERWISE)
        pairs = zip(first.memories, second.memories, strict=True)
        self.memories = [self._same_memory(*pair) for pair in pairs]
        steps = [self._merged(*pair) for pair in zip(first.steps, second.steps, strict=True)]
        self._views = [self._merged(*pair) for pair in zip(first.views, second.views, strict=True)]
        self._places = {
            (view.shape, view.stride, view.offset, view.dtype, self.memories[view.memory].size) for view in self._views
        }
        self.outputs, self.arguments = self._merged(first.outputs, second.outputs), first.arguments
        self.slots, self.num_slots = _slots_of(first)
        self.layers = sorted({step.kwargs["layer"] for step in steps if step.function == "update"})
        self._tables: list[torch.Tensor] = []
        self._steps, self._parts = steps, self._compiled(first, second, steps)
        self.fresh = self._returned()

    def is_of(self, tokens: int) -> bool:
        """Returns whether it serves forwards of so many tokens."""
        return self._by[0] != self._by[1] or tokens == self._by[0]

    def parts(self, tokens: int) -> list[Part]:
        """Parts of a forward of so many tokens."""
        parts: list[Part] = []
        for part in self._parts:
            if isinstance(part, tuple):
                start, slope, count = part
                parts.append(Codes(start + slope * tokens, count))
            else:
                parts.append(_at(part, tokens))
        return parts

    def view(self, ref: Ref, tokens: int) -> View:
        """The view with a number, in a forward of so many tokens."""
        view: View = _at(self._views[ref], tokens)
        return view

    def check_against(self, record: Record) -> None:
        """Raise unless a further record is what this says of so many tokens.

        Raises:
            NotRecordable: numbers that grew with the tokens of the first two records grow by something else.
        """
        tokens = record.tokens
        is_same = len(record.steps) == len(self._steps) and len(record.views) == len(self._views)
        mine, others = (*self._views, *self._steps), (*record.views, *record.steps)
        if not is_same or any(_at(part, tokens) != other for part, other in zip(mine, others, strict=True)):
            raise NotRecordable("its forward depends on the number of cached tokens")

    def check(self, tokens: int) -> None:
        """Raise unless every tensor of a forward of so many tokens lies within its memory.

        Raises:
            NotRecordable: sizes do not grow evenly with the tokens.
        """
        for place in self._places:
            shape, stride, offset, dtype, num_bytes = _at(place, tokens)
            last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            is_inside = offset >= 0 and (last + 1) * dtype.itemsize <= num_bytes
            if min(shape, default=1) < 0 or (0 not in shape and not is_inside):
                raise NotRecordable("sizes in its forward do not grow evenly with the tokens")

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of each slot; the first is no memory."""
        sizes = [0] * (self.num_slots + 1)
        for number, slot in self.slots.items():
            sizes[slot] = max(sizes[slot], _at(self.memories[number].size, tokens))
        return sizes

    def _compiled(self, first: Record, second: Record, steps: list[Step]) -> list[Any]:
        """Steps of torch, and between them instructions: numbers at no token, what each token adds, and how many."""
        compilers = [Compiler(record, self.slots, self.masks, self._tables) for record in (first, second)]
        parts: list[Any] = []
        pending: tuple[list[Code], list[Code]] = ([], [])
        for place, step in enumerate(steps):
            codes = [
                compiler.codes(record.steps[place]) for compiler, record in zip(compilers, (first, second), strict=True)
            ]
            if codes[0] is not None and codes[1] is not None:
                pending[0].extend(codes[0])
                pending[1].extend(codes[1])
                continue
            if pending[0]:
                parts.append(self._numbers(*pending))
                pending = ([], [])
            parts.append(step)
        return [*parts, self._numbers(*pending)] if pending[0] else parts

    def _numbers(self, first: list[Code], second: list[Code]) -> tuple[Numbers, Numbers, int]:
        at_first, at_second = (
            np.array([number for code in codes for number in code], dtype=np.int64) for codes in (first, second)
        )
        width = self._by[1] - self._by[0]
        if len(at_first) != len(at_second) or (width == 0 and not np.array_equal(at_first, at_second)):
            raise NotRecordable(OTHERWISE)
        slope, rest = np.divmod(at_second - at_first, width or 1)
        if rest.any():
            raise NotRecordable("its forward depends on the number of cached tokens")
        return at_first - slope * self._by[0], slope, len(first)

    def _returned(self) -> dict[int, int]:
        """Memories that are returned and that torch neither reads nor writes, by their slots."""
        of_torch = {
            self._views[ref].memory
            for part in self._parts
            if isinstance(part, Step)
            for ref in refs_of((part.args, part.kwargs, part.results))
        }
        returned = {self._views[ref].memory for ref in refs_of(self.outputs)}
        return {self.slots[memory]: memory for memory in returned - of_torch if memory in self.slots}

    def _same_memory(self, first: Memory, second: Memory) -> Memory:
        is_same = first.argument == second.argument and (first.tensor is None) == (second.tensor is None)
        if is_same and first.tensor is not None and first.tensor is not second.tensor:
            assert second.tensor is not None
            is_same = first.tensor.shape == second.tensor.shape and torch.equal(first.tensor, second.tensor)
        if not is_same:
            raise NotRecordable(OTHERWISE)
        return Memory(self._merged(first.size, second.size), first.tensor, first.argument)

    def _merged(self, first: Any, second: Any) -> Any:
        """One value for both, with `Affine` for integers that grow."""
        if type(first) is not type(second):
            raise NotRecordable(OTHERWISE)
        if first == second:
            return first
        if isinstance(first, Step | View):
            names = [field.name for field in dataclasses.fields(first)]
            return type(first)(*[self._merged(getattr(first, name), getattr(second, name)) for name in names])
        if isinstance(first, list | tuple) and len(first) == len(second):
            return type(first)([self._merged(*pair) for pair in zip(first, second, strict=True)])
        if isinstance(first, dict) and first.keys() == second.keys():
            return {key: self._merged(value, second[key]) for key, value in first.items()}
        width = self._by[1] - self._by[0]
        if type(first) is int and width and (second - first) % width == 0:
            slope = (second - first) // width
            return Affine(first - slope * self._by[0], slope)
        raise NotRecordable("its forward depends on the number of cached tokens")


def refs_of(value: Any) -> list[Ref]:
    """All references inside."""
    if type(value) is Ref:
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [ref for item in value for ref in refs_of(item)] if isinstance(value, list | tuple) else []


def room_of(codes: Codes) -> int:
    """Numbers that one of these products keeps of its tokens in fp32, at most."""
    most, place = 0, 0
    while place < len(codes.numbers):
        if codes.numbers[place] == PRODUCT:
            most = max(most, int(codes.numbers[place + COUNT] * codes.numbers[place + NUM_IN]))
        place += int(codes.numbers[place + 1])
    return most


def _slots_of(record: Record) -> tuple[dict[int, int], int]:
    """Slots of what a forward writes, and of its arguments; those that are never used at once share one."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(record.steps):
        for ref in refs_of((step.args, step.kwargs, step.results)):
            memory = record.views[ref].memory
            first.setdefault(memory, number)
            last[memory] = number
    kept = {record.views[ref].memory for ref in (*refs_of(record.outputs), *record.arguments.values())}
    slots: dict[int, int] = {}
    free: list[int] = []
    ends: dict[int, list[int]] = {}
    count = 0
    begins = sorted((begin, memory) for memory, begin in first.items() if record.memories[memory].tensor is None)
    done = -1
    for begin, memory in begins:
        for number in range(done, begin):
            free += ends.pop(number, [])
        done = begin
        if memory not in kept and free:
            slots[memory] = free.pop()
        else:
            count += 1
            slots[memory] = count
        if memory not in kept:
            ends.setdefault(last[memory], []).append(slots[memory])
    return slots, count


def _at(value: Any, tokens: int) -> Any:
    """`value` with the integers of so many tokens."""
    if type(value) is Affine:
        return value.start + value.slope * tokens
    if isinstance(value, Step | View):
        return type(value)(*[_at(getattr(value, field.name), tokens) for field in dataclasses.fields(value)])
    if isinstance(value, list | tuple):
        return type(value)([_at(item, tokens) for item in value])
    if isinstance(value, dict):
        return {key: _at(item, tokens) for key, item in value.items()}
    return value
