"""Instructions of the core for the steps of a record: see kernels/native/replay.c.

An address is two numbers: which base, and bytes after it. Base 0 is the beginning of all memory.
"""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_specdec.common.transfer import HOST
from hf_specdec.compat.modules import TO_COPY, is_elementwise
from hf_specdec.forward.recorded.trace import Columns, Mask, NotRecordable, Record, Ref, Step, View
from hf_specdec.kernels.cpu import HALVES, KINDS
from hf_specdec.kernels.products import in_whole_vectors

PRODUCT, NORM, ATTENTION, UPDATE, MAP, LOOKUP, PACKED = range(7)
COPY, NEGATE, ADD, SUBTRACT, MULTIPLY, TABLE = range(6)
DIMS = 5  # of a map
COUNT, NUM_IN = 10, 12  # places in a product's instruction
LANES = 8  # that a row of a matrix is a multiple of
NO_TENSOR = (0, 0)
aten = torch.ops.aten
BINARY = {aten.add.Tensor: ADD, aten.sub.Tensor: SUBTRACT, aten.mul.Tensor: MULTIPLY}
UNARY = {aten.neg.default: NEGATE, TO_COPY: COPY, aten.clone.default: COPY}
COPY_TO = aten.copy_.default

Code = list[int]
Address = tuple[int, int]
Function = Callable[[torch.Tensor], torch.Tensor]


class Compiler:
    """Makes instructions of a record's steps.

    Args:
        slots: of the memories that the forward writes, and of its arguments: their bases.
        masks: paths of the masks, in the order of their numbers.
        tables: gets results of functions, `(65_536,)`, whose addresses the instructions name.
    """

    def __init__(self, record: Record, slots: dict[int, int], masks: Sequence[str], tables: list[torch.Tensor]) -> None:
        self._record, self._slots, self._masks, self._tables = record, slots, list(masks), tables

    def codes(self, step: Step) -> list[Code] | None:
        """Instructions that do what a step does; `None` where only torch does it.

        Raises:
            NotRecordable: nothing does.
        """
        args = self._resolved(step.args)
        results = [self._record.views[ref] for ref in step.results]
        codes: list[Code] | None = None
        if isinstance(step.function, str):
            codes = getattr(self, f"_{step.function}")(args, step.kwargs, *results)
            if codes is None:
                raise NotRecordable(f"its {step.function} reads tensors that are laid out otherwise")
        elif step.function in BINARY and not step.kwargs:
            codes = self._binary(BINARY[step.function], args, results[0])
        elif step.function in UNARY:
            codes = self._mapped(UNARY[step.function], results[0], args[0])
        elif step.function is COPY_TO:
            codes = self._mapped(COPY, results[0], args[1])
        elif step.function is aten.cat.default:
            codes = self._joined(args, results[0])
        elif step.function is aten.embedding.default:
            codes = self._lookup(args, results[0])
        elif step.function in (aten.mm.default, aten.addmm.default) and not step.kwargs:
            codes = self._matrix_product(args, results[0])
        elif step.function is in_whole_vectors:
            codes = self._tabulated(functools.partial(args[0], **step.kwargs), args[1], results)
        elif is_elementwise(step.function) and not step.is_in_place:
            function = functools.partial(_of_first, step.function, args[1:], step.kwargs)
            codes = self._tabulated(function, args[0], results, others=[*args[1:], *step.kwargs.values()])
        return codes

    def _resolved(self, value: Any) -> Any:
        if type(value) is Ref:
            return self._record.views[value]
        return type(value)([self._resolved(item) for item in value]) if type(value) in (list, tuple) else value

    def _address(self, view: View | None) -> Address:
        if view is None:
            return NO_TENSOR
        start = view.offset * view.dtype.itemsize
        if (slot := self._slots.get(view.memory)) is not None:
            return slot, start
        tensor = self._record.memories[view.memory].tensor
        assert tensor is not None
        return 0, tensor.untyped_storage().data_ptr() + start

    def _linear(self, args: tuple[Any, ...], numbers: dict[str, Any], out: View) -> list[Code]:
        tokens, weight, bias = args
        num_out, num_in = reversed(weight.shape) if numbers["is_transposed"] else weight.shape
        return [self._product(tokens, weight, bias, out, (num_out, num_in, numbers["is_transposed"]))]

    def _product(self, tokens: View, weight: View, bias: View | None, out: View, sizes: tuple[int, int, bool]) -> Code:
        places = (*self._address(tokens), *self._address(weight), *self._address(bias), *self._address(out))
        return _code(PRODUCT, *places, _numel(tokens.shape) // sizes[1], *sizes[:2], KINDS[tokens.dtype], sizes[2])

    def _packed_linear(self, args: tuple[Any, ...], numbers: dict[str, Any], out: View) -> list[Code]:
        tokens, weight, bias = args
        num_in = tokens.shape[-1]
        places = (*self._address(tokens), *self._address(weight), *self._address(bias), *self._address(out))
        sizes = (_numel(tokens.shape) // num_in, out.shape[-1], num_in)
        return [_code(PACKED, *places, *sizes, KINDS[tokens.dtype], numbers["format"])]

    def _matrix_product(self, args: tuple[Any, ...], out: View) -> list[Code] | None:
        """Torch's product with a matrix that lies in memory as layers' do."""
        *bias, tokens, weight = args
        num_in, num_out = weight.shape
        is_known = tokens.dtype == weight.dtype and tokens.dtype in KINDS and num_in % LANES == 0
        is_usual = weight.stride == (1, num_in) and _is_contiguous(tokens) and _is_contiguous(out)
        has_bias = bool(bias) and bias[0].shape == (num_out,) and bias[0].stride == (1,)
        if not (is_known and is_usual) or (bias and not has_bias):
            return None
        return [self._product(tokens, weight, bias[0] if bias else None, out, (num_out, num_in, False))]

    def _norm(self, args: tuple[Any, ...], numbers: dict[str, Any], out: View) -> list[Code]:
        tokens, weight = args
        (size,) = weight.shape
        places = (*self._address(tokens), *self._address(weight), *self._address(out))
        sizes = (_numel(tokens.shape) // size, size, _bits(numbers["epsilon"]), KINDS[tokens.dtype])
        return [_code(NORM, *places, *sizes)]

    def _attention(self, args: tuple[Any, ...], numbers: dict[str, Any], out: View) -> list[Code] | None:
        query, key, value, mask, sinks = args
        is_cached = isinstance(key, Columns) and isinstance(value, Columns) and key.layer == value.layer
        if not is_cached or not (mask is None or isinstance(mask, Mask)) or not _is_contiguous(out):
            return None
        _, heads, num_queries, dim = query.shape
        number = -1 if mask is None else self._masks.index(mask.path)
        places = (*self._address(query), *self._address(out), key.layer, number, *self._address(sinks))
        groups = (numbers["batch"], numbers["kv_heads"], heads // numbers["kv_heads"])
        scales = (_bits(numbers["scaling"]), _bits(numbers["cap"]), KINDS[query.dtype])
        return [_code(ATTENTION, *places, *groups, num_queries, dim, out.shape[-1], *query.stride[:3], *scales)]

    def _update(self, args: tuple[Any, ...], numbers: dict[str, Any]) -> list[Code] | None:
        key, value = args
        if key.dtype != value.dtype or key.stride[3] != 1 or value.stride[3] != 1:
            return None
        places = (*self._address(key), *self._address(value), numbers["layer"])
        return [
            _code(UPDATE, *places, *key.shape, value.shape[3], *key.stride[:3], *value.stride[:3], KINDS[key.dtype])
        ]

    def _lookup(self, args: tuple[Any, ...], out: View) -> list[Code] | None:
        weight, ids = args[:2]
        if not (_is_contiguous(weight) and _is_contiguous(ids) and ids.dtype == torch.int64):
            return None
        places = (*self._address(weight), *self._address(ids), *self._address(out))
        return [_code(LOOKUP, *places, _numel(ids.shape), weight.shape[1] * weight.dtype.itemsize, weight.shape[0])]

    def _binary(self, function: int, args: tuple[Any, ...], out: View) -> list[Code] | None:
        first, second = args
        if not isinstance(first, View) or first.dtype != out.dtype:
            return None
        if not isinstance(second, View):
            return self._mapped(function, out, first, number=float(second))
        return self._mapped(function, out, first, second) if second.dtype == out.dtype else None

    def _tabulated(
        self, function: Function, tensor: Any, results: list[View], *, others: Sequence[Any] = ()
    ) -> list[Code] | None:
        """A function of one tensor of halves: of each of the numbers that there are, as torch computes it."""
        is_of_one = isinstance(tensor, View) and not any(isinstance(value, View | list | tuple) for value in others)
        if not is_of_one or tensor.dtype not in HALVES or [view.dtype for view in results] != [tensor.dtype]:
            return None
        numbers = torch.arange(1 << 16, dtype=torch.int32, device=HOST).to(torch.uint16).view(tensor.dtype)
        table = function(numbers).contiguous().view(torch.int16)
        table = next((same for same in self._tables if torch.equal(same, table)), table)
        self._tables.append(table)
        return self._mapped(TABLE, results[0], tensor, table=(0, table.data_ptr()))

    def _joined(self, args: tuple[Any, ...], out: View) -> list[Code] | None:
        """A copy of each part to its place in the result."""
        parts, dim = args[0], (args[1] if len(args) > 1 else 0) % len(out.shape)
        codes, start = [], 0
        for part in parts:
            if part.dtype != out.dtype or len(part.shape) != len(out.shape):
                return None
            shape = (*out.shape[:dim], part.shape[dim], *out.shape[dim + 1 :])
            target = View(out.memory, out.dtype, shape, out.stride, out.offset + start * out.stride[dim])
            if (code := self._mapped(COPY, target, part)) is None:
                return None
            codes += code
            start += part.shape[dim]
        return codes

    def _mapped(
        self,
        function: int,
        out: View,
        first: View,
        second: View | None = None,
        *,
        number: float = 0.0,
        table: Address = NO_TENSOR,
    ) -> list[Code] | None:
        """A function of single numbers; `None` for numbers or shapes that the core does not take."""
        views = [view for view in (out, first, second) if view is not None]
        if any(view.dtype not in KINDS for view in views):
            return None
        sizes, strides = _collapsed(out.shape, [_broadcast(view, out.shape) for view in views])
        if (missing := DIMS - len(sizes)) < 0:
            return None
        kinds = [KINDS[view.dtype] for view in views] + [0] * (3 - len(views))
        other = table if second is None else self._address(second)
        places = (*self._address(out), *self._address(first), *other)
        steps = [step for row in strides for step in (*[0] * missing, *row)] + [0] * DIMS * (3 - len(views))
        return [_code(MAP, function, *kinds, *places, _bits(number), *[1] * missing, *sizes, *steps)]


def _of_first(
    function: Callable[..., torch.Tensor], settings: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor
) -> torch.Tensor:
    return function(tensor, *settings, **kwargs)


def _code(name: int, *operands: int) -> Code:
    return [name, len(operands) + 2, *map(int, operands)]


def _bits(number: float) -> int:
    """The bits of a double, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _is_contiguous(view: View) -> bool:
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _broadcast(view: View, shape: Sequence[int]) -> list[int]:
    """Strides of a view that is expanded to `shape`."""
    missing = len(shape) - len(view.shape)
    pairs = zip(view.shape, view.stride, strict=True)
    return [0] * missing + [0 if size == 1 else stride for size, stride in pairs]


def _collapsed(shape: Sequence[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same without dimensions of one, and with those joined that follow one another in all tensors."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        steps = [row[dim] for row in strides]
        if sizes and all(row[-1] == step * size for row, step in zip(kept, steps, strict=True)):
            sizes[-1] *= size
            for row, step in zip(kept, steps, strict=True):
                row[-1] = step
            continue
        sizes.append(size)
        for row, step in zip(kept, steps, strict=True):
            row.append(step)
    return (sizes, kept) if sizes else ([1], [[1] for _ in strides])
