"""A network's forwards over a static cache, compiled once for all widths, with what is read of their logits inside.

What cannot be compiled runs as it is written, and the reason is kept. Knows nothing of trees or texts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.transfer import is_host
from hf_specdec.compat import compiling
from hf_specdec.compat.devices import mark_dynamic
from hf_specdec.compat.modules import modules_of
from hf_specdec.forward.checked_steps import CheckedSteps, Step, TakenForms, checked_steps
from hf_specdec.forward.graph_masks import TREE, TREE_DIMS, with_masks

__all__ = [
    "DRAFT_STEP",
    "MODEL_STEP",
    "CompiledForward",
    "CompiledShapes",
    "ForwardWidths",
    "Step",
    "StepKind",
]

NUM_WARMING = 2  # forwards of a shape that take longer on an accelerator: CUDA graphs are recorded in the second
NUM_SERVED = 2000  # forwards of the 7B shape take 12 seconds on an H100, compiling one 26
MOST_MISSED = 2  # widths that a function of all widths had no graph for; torch runs one of more than 8 as it is written
ANY_WIDTH = 0  # in the place of a width: of all but one, as torch compiles dimensions of one element apart


@dataclass(frozen=True, slots=True)
class StepKind:
    """Function of a network that is compiled.

    Attributes:
        make: makes a function of the network; its two results are the caller's.
        width_dims: the dimension of its arguments, by name, that is as long as a forward is wide; that of all values of
            a dictionary. Others may be wider, too, at the price of one more graph.
        makes_masks: whether it takes a tree as of `graph_masks`.
    """

    make: Callable[[Any], Step]
    width_dims: Mapping[str, int]
    makes_masks: bool = False

    def mark(self, inputs: Mapping[str, Any]) -> None:
        """Let the graph that is made for these arguments take any number of tokens."""
        named = [(inputs[name], dim) for name, dim in self.width_dims.items() if name in inputs]
        for value, dim in named + _tree_dims(inputs):
            for tensor in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim > dim:
                    mark_dynamic(tensor, dim % tensor.ndim)


def _model_step(model: Any) -> Step:
    """A model's forward, with the best token of each column."""

    def step(**inputs: Any) -> tuple[Any, torch.Tensor]:
        outputs = model(**with_masks(inputs), return_dict=True)
        return outputs, outputs.logits.argmax(dim=-1)

    return step


TOKEN_DIMS = dict.fromkeys(("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids"), 1)
MODEL_STEP = StepKind(_model_step, {**TOKEN_DIMS, "position_ids": -1, "attention_mask": 2}, makes_masks=True)
DRAFT_STEP = StepKind(_model_step, MODEL_STEP.width_dims)  # whose trees grow: later columns see more than each other


def _tree_dims(inputs: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Tensors of a tree and the dimension of each that is as long as a forward is wide."""
    tree = inputs.get(TREE) or {}
    return [(tensor, dim) for name, dim in TREE_DIMS for tensor in tree.get(name, ())]


class CompiledForward:
    """Runs one network's forwards. Kept on the network, so that later calls find what was compiled.

    Args:
        model: a module with a `device`.
        settings: keyword arguments of `torch.compile`.
        kind: what is compiled; by default the model's output with the best token of each column.

    Attributes:
        shapes: `(batch, width, columns)` of what has run, and what else graphs are made for, with the number of runs as
            long as they are the first ones.
        num_graphs (`int`): what torch has made of them: one or more of each function, few of them for all lengths.
        seconds (`float`): of the forwards that compile, and of those in which an accelerator records CUDA graphs.
        reason (`str | None`): why forwards run as they are written, once that was found out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Mapping[str, Any],
        kind: StepKind = MODEL_STEP,
    ) -> None:
        self.model: Any = model
        self.settings, self._kind = dict(settings), kind
        self.shapes: dict[tuple[int, ...], int] = {}
        self.num_graphs, self.seconds = 0, 0.0
        self.reason: str | None = None
        self._sharing: frozenset[tuple[int, ...]] | None = None  # shapes that stay together, once widths are apart
        self._missed = Counter[tuple[int, ...]]()  # graphs that a function needed for one more width
        self._wanted = Counter[tuple[int, ...]]()  # forwards of functions that are not compiled yet
        self._steps: dict[tuple[int, ...], Step] = {}  # torch stops compiling a function that has too many graphs
        self._taken: TakenForms = {}
        self._kept: dict[int, StaticSpecCache] = {}
        self._lock = threading.Lock()

    @property
    def makes_masks(self) -> bool:
        """Returns whether it takes a tree as of `graph_masks` in the place of masks."""
        return self._kind.makes_masks

    @property
    def is_lent(self) -> bool:
        """Returns whether the next forward may write over what one has returned, as CUDA graphs do."""
        return self.reason is None and not is_host(self.model.device)

    def is_recorded(self, shape: tuple[int, ...]) -> bool:
        """Returns whether forwards of this shape are compiled and take no longer than later ones."""
        num_warming = 1 if is_host(self.model.device) else NUM_WARMING
        return self.reason is None and self.shapes.get(shape, 0) >= num_warming

    def __call__(
        self, shape: tuple[int, ...], inputs: Mapping[str, Any], checked: CheckedSteps | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Runs the step: of a model its output, and the best token of each column, `(batch, width)`.

        Args:
            shape: `(batch, width, columns)` and more: what a graph is made for.
            checked: of the call; without it torch compares the model in each forward with what was compiled.
        """
        if self.reason is not None:
            return self.as_written(inputs)
        if self.is_recorded(shape):
            return self._run(shape, inputs, checked)
        num_runs = self.shapes.get(shape, 0)
        start, num_before = time.perf_counter(), compiling.num_compiled()
        try:
            if not num_runs and self._is_shared(shape):
                self._kind.mark(inputs)
            result = self._step_of(shape)(**inputs)
        except Exception as error:  # compilers fail in many ways; what the forward itself raises comes below
            if compiling.forbids_compiling():
                raise
            result = self.as_written(inputs)
            self.reason = " ".join([type(error).__name__, *str(error).split("\n")[:2]])
            return result
        num_new = compiling.num_compiled() - num_before
        self.num_graphs += num_new
        if num_new or not is_host(self.model.device):
            self.seconds += time.perf_counter() - start
        if num_new and not num_runs:
            self._count_missed(shape)
        self.shapes[shape] = num_runs + 1
        return result

    def width_for(self, shape: tuple[int, ...], wider: Sequence[int], flat_tokens: int) -> int:
        """The width that a forward runs at: its own, or one of `wider` that takes about the same time.

        So a method that drafts starts with one graph; that of one token is compiled once it was wanted `NUM_SERVED`
        times.

        Args:
            shape: of the least width that holds the forward.
            wider: other widths that hold it, ascending.
            flat_tokens: of `FixedShapes`.
        """
        batch, width, *rest = shape
        serving = [other for other in wider if batch * other <= flat_tokens]
        function = self._function_of(shape)
        if not serving or self.reason is not None or function in self._steps:
            return width
        compiled = [other for other in serving if self._function_of((batch, other, *rest)) in self._steps]
        if not compiled:
            return serving[0] if self._sharing is None else serving[-1]
        self._wanted[function] += 1
        return compiled[0] if self._wanted[function] <= NUM_SERVED else width

    def as_written(self, inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        """The same, not compiled, for any shape."""
        return self._kind.make(self.model)(**inputs)

    def take_cache(self, batch: int, capacity: int, part: int = 0) -> StaticSpecCache | None:
        """The cache that the last call has left, empty, where it has this shape and no other call has taken it.

        A CUDA graph is recorded for the addresses of its buffers. Those made in inference mode are of no use outside.

        Args:
            part: which of the caches that a call uses at the same time.
        """
        with self._lock:
            kept = self._kept.get(part)
            if kept is None or (len(kept.lengths), kept.capacity) != (batch, capacity):
                return None
            del self._kept[part]
        if kept.is_inference and not torch.is_inference_mode_enabled():
            return None
        kept.empty()
        return kept

    def keep_cache(self, cache: StaticSpecCache, part: int = 0) -> None:
        """Keep a cache that no one uses any more for the next call, in the place of an earlier one."""
        if self.reason is None and cache.lengths:
            with self._lock:
                self._kept[part] = cache

    def _run(
        self, shape: tuple[int, ...], inputs: Mapping[str, Any], checked: CheckedSteps | None
    ) -> tuple[Any, torch.Tensor]:
        """One more forward of a shape; of arguments whose guards held before in this call, without guards."""
        step = self._step_of(shape)
        if checked is None:
            return step(**inputs)
        return checked.run(step, shape, inputs, self._taken, lambda: _holders(self.model, inputs))

    def _step_of(self, shape: tuple[int, ...]) -> Step:
        if not is_host(self.model.device):
            compiling.mark_step_begin()
        function = self._function_of(shape)
        if function not in self._steps:
            self._steps[function] = compiling.compiled(self._kind.make(self.model), self.settings)
        return self._steps[function]

    def _function_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Function for the shapes that are compiled together: of several tokens those that differ in width and columns.

        Where the model's code depends on the width, those that differ in columns; where the caller wants it, none.
        """
        batch, width, _, *rest = shape
        if self.settings.get("dynamic") is False:
            return shape
        return (batch, ANY_WIDTH if self._is_shared(shape) else width, *rest)

    def _count_missed(self, shape: tuple[int, ...]) -> None:
        """A graph was made for a shape: compile widths apart, from here on, where one after another needs its own."""
        function = self._function_of(shape)
        shapes = [other for other in self.shapes if other[2:] == shape[2:] and self._function_of(other) == function]
        self._missed[function] += bool(shapes)
        if self._missed[function] > MOST_MISSED and self._sharing is None:
            self._sharing = frozenset((*self.shapes, shape))

    def _is_shared(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the graph of this shape is to serve other widths."""
        is_known = self._sharing is None or shape in self._sharing
        return shape[1] > 1 and self.settings.get("dynamic") is not False and is_known


def _holders(model: torch.nn.Module, inputs: Mapping[str, Any]) -> list[object]:
    """The objects that a forward may change: the model's modules and its caches with their layers."""
    caches = [value for value in inputs.values() if isinstance(value, Cache)]
    return [*modules_of(model), *caches, *(layer for cache in caches for layer in cache.layers)]


@dataclass(frozen=True, slots=True)
class CompiledShapes:
    """The shapes of a call's forwards over a static cache, and what runs them."""

    fixed: FixedShapes
    compiled: CompiledForward
    checked: CheckedSteps | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checked", checked_steps(self.fixed))

    def run(self, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        """The two tensors that a step returns, which later forwards do not write over.

        Args:
            shape: as of `CompiledForward`; a width that is none of `fixed` is not compiled.
        """
        if shape[1] not in self.fixed.widths:
            return self.compiled.as_written(inputs)
        first, second = self.compiled(shape, inputs, self.checked)
        return (first.clone(), second.clone()) if self.compiled.is_lent else (first, second)


class ForwardWidths:
    """Numbers of columns that the forwards of one call compute; any number where no shapes are fixed.

    Attributes:
        all (`tuple[int, ...]`): ascending; grows for good beyond what drafters announced.
    """

    def __init__(self, fixed: FixedShapes | None, compiled: CompiledForward | None) -> None:
        self.all = () if fixed is None else fixed.widths
        self._flat_tokens = 0 if fixed is None else fixed.flat_tokens
        self._compiled = compiled

    def of(self, num_columns: int, shape_of: Callable[[int], tuple[int, ...]]) -> int:
        """For a forward of `num_columns`.

        Args:
            shape_of: from a width to what `CompiledForward` takes.
        """
        if self.all and num_columns > self.all[-1]:
            self.all = (*self.all, num_columns)
        fitting = [width for width in self.all if width >= num_columns]
        if not fitting or self._compiled is None:
            return min(fitting, default=num_columns)
        return self._compiled.width_for(shape_of(fitting[0]), fitting[1:], self._flat_tokens)
