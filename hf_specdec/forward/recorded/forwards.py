"""A model's recorded forwards: when they are made, compared, replayed and dropped."""

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import replaced
from hf_specdec.forward.inputs import tensors_of
from hf_specdec.forward.recorded.guard import Guard, foreign_part, tensors_of_modules
from hf_specdec.forward.recorded.program import Constant, Program
from hf_specdec.forward.recorded.template import Template
from hf_specdec.forward.recorded.trace import NotRecordable, Record, Trace
from hf_specdec.kernels import cpu
from hf_specdec.kernels.core_attention import additive, prepared
from hf_specdec.kernels.cpu import use_huge_pages

logger = logging.getLogger("hf_specdec")

LEAST_FORWARDS = 12  # that a process has computed before one is recorded,
LEAST_OF_KIND = 4  # and of its kind
LEAST_FOR_PAGES = 160  # forwards after which pages of 2 MB are worth their making: 0.6 s and 4 ms a forward for 256 MB
MOST_BYTES = 64 << 20  # of all programs of a model
MOST_TOKENS = 256  # of a forward
MOST_REFUSED = 3  # numbers of tokens, before the template counts as wrong
RELATIVE, ABSOLUTE = 1e-3, 1e-3  # how far numbers in fp32 may differ, which are added up in another order


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward.

    Attributes:
        outputs: the model's.
        is_replayed (`bool`): whether the core has replayed it.
        is_usual (`bool`): whether later ones of as many tokens take as long: not where they will be replayed.
    """

    outputs: Any
    is_replayed: bool = False
    is_usual: bool = True


@dataclass(slots=True)
class _Kind:
    """Forwards that differ in their number of tokens alone.

    Attributes:
        count (`int`): how many have been computed by the model.
        records (`list[Record]`): recorded so far, two at most.
        template (`Template | None`): of the two.
        programs: by the number of tokens.
        compared: numbers of tokens whose program gave the numbers of the model's forward.
        lengths: of the cached rows, before the recorded forwards.
        is_checked (`bool`): whether a third record was what the template says; one number of tokens needs none.
        refused: numbers of tokens whose program was not equal to the model's forward.
        reason (`str | None`): why none is recorded.
        returns: class of the outputs.
    """

    count: int = 0
    records: list[Record] = field(default_factory=list)
    template: Template | None = None
    programs: dict[int, Program] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    is_checked: bool = False
    refused: set[int] = field(default_factory=set)
    reason: str | None = None
    returns: type[Any] = dict

    def program(self, tokens: int) -> Program | None:
        """The program for so many tokens, made where one with fewer and one with more tokens have been compared."""
        if tokens not in self.programs and self.compared and min(self.compared) <= tokens <= max(self.compared):
            assert self.template is not None
            self.programs[tokens] = Program(self.template, tokens, torch.get_num_threads())
        return self.programs.get(tokens)


class RecordedForwards:
    """Forwards of one model on a CPU, recorded once and replayed.

    Args:
        model: the model, which is not kept.

    Attributes:
        reason (`str | None`): why nothing is recorded.
        huge_bytes (`int`): weights that were put into pages of 2 MB.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._count, self.huge_bytes = 0, 0
        self._last_reason: str | None = None
        self._guard: Guard | None = None
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._lock = threading.Lock()  # a program has memory for one forward
        self.reason = _reason_against(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unknown, ()

    def begin(self, model: PreTrainedModel) -> None:
        """A call begins: what kept its forwards from being recorded may be gone."""
        if self.reason is not None:
            self.reason = _reason_against(model)

    @property
    def last_reason(self) -> str | None:
        """Reason why forwards could not be recorded, the last one."""
        return self.reason or self._last_reason

    def forward(
        self,
        compute: Callable[[], Any],
        model: PreTrainedModel,
        inputs: dict[str, Any],
        cache: SpecCache,
        packed: PackedRows | None,
        call: object = None,
    ) -> Forward:
        """The model's outputs for `inputs`, by a record where there is one.

        Args:
            compute: the forward by the model's own code, with the kernels of the core.
            call: as of `Guard.holds`.
        """
        is_used = self.reason is None and cpu.core is not None and cpu.is_usual()
        if not is_used or not self._lock.acquire(blocking=False):
            return Forward(compute())
        try:
            self._count += 1
            if self._count != LEAST_FOR_PAGES:
                return self._forward(compute, model, inputs, cache, packed, call)
            self.huge_bytes = use_huge_pages(tensors_of_modules(model))
            logger.info("%d MB of weights lie in memory pages of 2 MB", self.huge_bytes >> 20)
            return replace(self._forward(compute, model, inputs, cache, packed, call), is_usual=False)
        finally:
            self._lock.release()

    def _forward(
        self,
        compute: Callable[[], Any],
        model: PreTrainedModel,
        inputs: dict[str, Any],
        cache: SpecCache,
        packed: PackedRows | None,
        call: object,
    ) -> Forward:
        tensors = tensors_of(inputs)
        masks = {path: tensor for path, tensor in tensors.items() if "mask" in path}
        arguments = {path: tensor for path, tensor in tensors.items() if path not in masks}
        if (ids := arguments.get("input_ids")) is None or ids.ndim != 2 or not cache.written_lengths:
            return Forward(compute())
        tokens = ids.shape[1]
        kind = self._kinds.setdefault(_kind_of(inputs, tensors, cache, packed, tokens), _Kind())
        kind.count += 1
        if kind.reason is not None or tokens > MOST_TOKENS or tokens in kind.refused:
            return Forward(compute())
        if self._count < LEAST_FORWARDS or kind.count < LEAST_OF_KIND:
            return Forward(compute(), is_usual=not self._has_programs)
        if self._guard is None or not self._guard.holds(model, call):
            self._drop(model)
            if self.reason is not None:
                return Forward(compute())
            kind = self._kinds.setdefault(_kind_of(inputs, tensors, cache, packed, tokens), _Kind())
        lengths = cache.written_lengths
        try:
            is_made = tokens in kind.programs
            if (program := kind.program(tokens)) is not None:
                assert kind.template is not None
                cache.append(kind.template.layers, tokens, packed)
                outputs = kind.returns(**program.run(arguments, _numbers_of(masks), cache, packed))
                if not is_made:
                    self._keep_small()
                return Forward(outputs, is_replayed=True)
            is_new = kind.template is None or not kind.template.is_of(tokens)
            if (is_new or not kind.is_checked) and lengths in kind.lengths:  # would not show what depends on these
                return Forward(compute(), is_usual=not self._has_programs)
            if is_new or not kind.is_checked:
                kind.lengths.append(lengths)
                trace = Trace(tensors_of_modules(model), arguments, masks, cache.layers)
                outputs = self._record(kind, compute, trace, tokens, list(masks))
                return Forward(outputs, is_usual=False)
            outputs = self._compare(kind, compute, arguments, masks, tokens, cache, packed)
            return Forward(outputs, is_usual=False)
        except NotRecordable as reason:
            self._last_reason = str(reason)
            kind.refused.add(tokens)
            if kind.template is None or len(kind.refused) > MOST_REFUSED:
                kind.reason = self._last_reason
            cache.cut(lengths)
            return Forward(compute(), is_usual=False)

    def _drop(self, model: PreTrainedModel) -> None:
        """Forget all records: the model has changed, or none has been made."""
        self._kinds, self.reason = {}, _reason_against(model)
        self._guard = Guard(model)

    def _record(
        self,
        kind: _Kind,
        compute: Callable[[], Any],
        trace: Trace,
        tokens: int,
        masks: Sequence[str],
    ) -> Any:
        """The model's forward, recorded."""
        with trace.noting(), replaced(recorder=trace):
            outputs = compute()
        kind.returns = type(outputs)
        record = trace.record(tokens, _refs_of(dict(outputs), trace))
        if kind.template is not None and kind.template.is_of(tokens):
            template, kind.template = kind.template, None
            template.check_against(record)
            kind.template, kind.is_checked = template, True
            return outputs
        if len(kind.records) == 2:
            kind.records, kind.template = kind.records[:1], None
        kind.records.append(record)
        if len(kind.records) == 2:
            kind.template = Template(kind.records[0], kind.records[1], masks)
            kind.is_checked = kind.records[0].tokens == tokens
        return outputs

    def _compare(
        self,
        kind: _Kind,
        compute: Callable[[], Any],
        arguments: Mapping[str, torch.Tensor],
        masks: Mapping[str, torch.Tensor],
        tokens: int,
        cache: SpecCache,
        packed: PackedRows | None,
    ) -> Any:
        """The model's forward, and the same by a new program, which is kept if the results are equal."""
        assert kind.template is not None
        lengths = cache.written_lengths
        program = Program(kind.template, tokens, torch.get_num_threads())
        outputs = compute()
        cache.cut(lengths)
        cache.append(kind.template.layers, tokens, packed)
        result = program.run(arguments, _numbers_of(masks), cache, packed)
        if not _is_same(tensors_of(dict(outputs)), tensors_of(result)):
            raise NotRecordable("a replayed forward gives other numbers")
        kind.programs[tokens] = program
        kind.compared.add(tokens)
        self._keep_small()
        return type(outputs)(**result)

    @property
    def _has_programs(self) -> bool:
        """Returns whether the core replays some of the forwards."""
        return any(kind.programs for kind in self._kinds.values())

    def _keep_small(self) -> None:
        """Forget the programs that were made first where all take too much memory."""
        programs = [(kind, tokens) for kind in self._kinds.values() for tokens in kind.programs]
        size = sum(kind.programs[tokens].num_bytes for kind, tokens in programs)
        while size > MOST_BYTES and len(programs) > 1:
            kind, tokens = programs.pop(0)
            size -= kind.programs.pop(tokens).num_bytes


class _Unknown:
    """Recorded forwards of a copied model: none."""


def _reason_against(model: PreTrainedModel) -> str | None:
    """Reason why a model's forwards are not recorded."""
    if (reason := cpu.why_unused()) is not None:
        return reason
    if (foreign := foreign_part(model)) is not None:
        return f"{foreign} is not torch's or transformers'"
    plain = (torch.Tensor, torch.nn.Parameter)
    if any(type(tensor) not in plain or not tensor.is_cpu for tensor in tensors_of_modules(model)):
        return "its weights are no plain tensors on the CPU"
    return None


def _kind_of(
    inputs: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    cache: SpecCache,
    packed: PackedRows | None,
    tokens: int,
) -> tuple[Any, ...]:
    """Key of the forwards that share a template."""
    values = tuple((name, _plain(value)) for name, value in inputs.items())
    shapes = tuple((path, tensor.dtype, _shape_of(path, tensor, tokens)) for path, tensor in tensors.items())
    rows = len(cache.lengths), packed is not None, tokens == 1
    return (values, shapes, rows, cache.dtype, torch.get_num_threads(), torch.is_inference_mode_enabled())


def _shape_of(path: str, tensor: torch.Tensor, tokens: int) -> tuple[int | None, ...]:
    """The shape but for the tokens; of a mask, which the number of cached tokens changes too, the rows."""
    if "mask" in path:
        return (len(tensor), tensor.ndim)
    return tuple(None if size == tokens else size for size in tensor.shape)


def _plain(value: Any) -> Any:
    """A setting as it can be compared; tensors and caches are the same in all forwards of a kind."""
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _numbers_of(masks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Attention's masks as the core reads them; none of those that hide nothing from the only token of each row."""
    return {path: _in_fp32(mask) for path, mask in masks.items() if mask.ndim == 4 and not _hides_nothing(mask)}


def _hides_nothing(mask: torch.Tensor) -> bool:
    return mask.shape[2] == 1 and bool(mask.all() if mask.dtype == torch.bool else not mask.any())


def _in_fp32(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.float32 and mask.stride(3) == 1:
        return mask
    return prepared(mask, ("core",), lambda: additive(mask, torch.float32, -torch.inf).contiguous())


def _refs_of(value: Any, trace: Trace) -> Any:
    """A forward's outputs as a record has them."""
    if isinstance(value, torch.Tensor):
        return trace.ref(value)
    if isinstance(value, Mapping):
        return {name: _refs_of(item, trace) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_refs_of(item, trace) for item in value])
    return Constant()


def _is_same(outputs: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether two forwards gave the same: bit by bit in halves, nearly in fp32."""
    if outputs.keys() != others.keys():
        return False
    for path, tensor in outputs.items():
        is_near = functools.partial(torch.allclose, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        if not (is_near if tensor.dtype == torch.float32 else torch.equal)(tensor, others[path]):
            return False
    return True
