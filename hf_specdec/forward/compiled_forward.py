"""A network's forwards over a static cache, compiled once for all widths, with what is read of their logits inside.

What cannot be compiled runs as it is written, and the reason is kept. Guards compare some thousand attributes of the
model with what was compiled: where they held once in a call, its later forwards go without them. Knows nothing of trees
or texts.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.transfer import is_host
from hf_specdec.compat import compiling
from hf_specdec.compat.devices import mark_dynamic
from hf_specdec.compat.modules import modules_of

Step = Callable[..., tuple[Any, torch.Tensor]]
NUM_WARMING = 2  # forwards of a shape that take longer on an accelerator: CUDA graphs are recorded in the second
ANY_WIDTH = 0  # in the place of a width: of all but one, as torch compiles dimensions of one element apart
TOKEN_DIMS = dict.fromkeys(("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids"), 1)


class CheckedSteps:
    """Compiled steps of one call in which no other code runs between the forwards."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, Step] = {}  # what to run for arguments of a form, with the same objects among them

    def run(
        self,
        step: Step,
        shape: tuple[int, ...],
        inputs: Mapping[str, Any],
        holders: Callable[[], Iterable[object]],
    ) -> tuple[Any, torch.Tensor]:
        """Calls the function, without its guards where they held for such arguments before.

        Args:
            step: of `compat.compiled`, with a graph for these arguments unless the model has changed.
            shape: what else the form consists of.
            holders: as of `Unguarded.bind`.
        """
        objects: list[int] = []
        form = (shape, _form(inputs, objects), tuple(objects))
        if form in self._steps:
            return self._steps[form](**inputs)
        result: tuple[Any, torch.Tensor]
        if (direct := compiling.without_guards(step, inputs)) is not None:
            result, bound = direct.bind(inputs, holders)
        else:  # torch compiles it again, or runs it in parts that have guards of their own
            result, bound = step(**inputs), None
            direct = compiling.without_guards(step, inputs)
        self._steps[form] = bound or direct or step
        return result


def checked_steps(fixed: FixedShapes | None) -> CheckedSteps | None:
    """For the forwards of one call; `None` where each checks its guards."""
    return CheckedSteps() if fixed is not None and fixed.is_undisturbed else None


def _form(value: Any, objects: list[int]) -> Hashable:
    """Equal for arguments between which torch's guards see no difference, but for the objects among them.

    Args:
        objects: gets the identity of each of these.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((name, _form(item, objects)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_form(item, objects) for item in value)
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    objects.append(id(value))
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True, slots=True)
class StepKind:
    """Function of a network that is compiled.

    Attributes:
        make: makes a function of the network; its two results are the caller's.
        width_dims: the dimension of its arguments, by name, that is as long as a forward is wide; that of all values of
            a dictionary. Others may be wider, too, at the price of one more graph.
    """

    make: Callable[[Any], Step]
    width_dims: Mapping[str, int]

    def mark(self, inputs: Mapping[str, Any]) -> None:
        """Let the graph that is made for these arguments take any number of tokens."""
        for value, dim in [(inputs[name], dim) for name, dim in self.width_dims.items() if name in inputs]:
            for tensor in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim > dim:
                    mark_dynamic(tensor, dim % tensor.ndim)


def _model_step(model: Any) -> Step:
    """A model's forward, with the best token of each column."""

    def step(**inputs: Any) -> tuple[Any, torch.Tensor]:
        outputs = model(**inputs, return_dict=True)
        return outputs, outputs.logits.argmax(dim=-1)

    return step


MODEL_STEP = StepKind(_model_step, {**TOKEN_DIMS, "position_ids": -1, "attention_mask": 2})


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
        self._steps: dict[tuple[int, ...], Step] = {}  # torch stops compiling a function that has too many graphs
        self._kept: dict[int, StaticSpecCache] = {}
        self._lock = threading.Lock()

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
            if not num_runs and shape[1] > 1 and self._takes_widths:
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
        self.shapes[shape] = num_runs + 1
        return result

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
        return checked.run(step, shape, inputs, lambda: _holders(self.model, inputs))

    def _step_of(self, shape: tuple[int, ...]) -> Step:
        if not is_host(self.model.device):
            compiling.mark_step_begin()
        function = self._function_of(shape)
        if function not in self._steps:
            self._steps[function] = compiling.compiled(self._kind.make(self.model), self.settings)
        return self._steps[function]

    def _function_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Function for the shapes that are compiled together: of several tokens those that differ in width and columns.

        torch runs a function that needs more than 8 graphs, as one whose code depends on the width, as it is written.
        """
        batch, width, _, *rest = shape
        return (batch, ANY_WIDTH if width > 1 else width, *rest) if self._takes_widths else shape

    @property
    def _takes_widths(self) -> bool:
        """Returns whether one graph is to serve several widths; the caller may want it otherwise."""
        return self.settings.get("dynamic") is not False


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

    def __init__(self, fixed: FixedShapes | None) -> None:
        self.all = () if fixed is None else fixed.widths
        self._flat_tokens = 0 if fixed is None else fixed.flat_tokens

    def of(self, num_columns: int, batch: int) -> int:
        """For a forward of `num_columns` in each row: where two take the time of one, one graph serves both."""
        if self.all and num_columns > self.all[-1]:
            self.all = (*self.all, num_columns)
        least, *wider = [width for width in self.all if width >= num_columns] or [num_columns]
        return wider[0] if least == 1 and wider and batch * wider[0] <= self._flat_tokens else least
