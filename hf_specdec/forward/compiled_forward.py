"""A network's forwards over a static cache, compiled once for each width, with what is read of their logits inside.

What cannot be compiled runs as it is written, and the reason is kept; what a hook raises is shown. Knows nothing of
trees or texts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.compat.hook_errors import raised_in_hook
from hf_specdec.transfer import is_host

__all__ = ["CompiledForward", "CompiledShapes", "ForwardWidths", "Step"]

Step = Callable[..., tuple[Any, torch.Tensor]]
NUM_WARMING = 2  # forwards of a shape that take longer on an accelerator: CUDA graphs are recorded in the second
NUM_SERVED = 2000  # forwards of the 7B shape take 20 seconds on an H100, compiling one 30


class CompiledForward:
    """Runs one network's forwards. Kept on the network, so that later calls find what was compiled.

    Args:
        model: a module with a `device`.
        settings: keyword arguments of `torch.compile`.
        make_step: makes a function of one shape; by default the model's output with the best token of each column.
        hooks: those that the model has, to be compared.

    Attributes:
        shapes: `(batch, width, columns)` of what has run, and what else graphs are made for, with the number of runs as
            long as they are the first ones.
        num_graphs (`int`): what torch has made of them: one or more of each function, few of them for all lengths.
        seconds (`float`): of the first forwards of each shape, which compile.
        reason (`str | None`): why forwards run as they are written, once that was found out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Mapping[str, Any],
        make_step: Callable[[Any], Step] | None = None,
        hooks: Hashable = (),
    ) -> None:
        self.model: Any = model
        self.hooks = hooks
        self.settings, self._make_step = dict(settings), make_step or _model_step
        self.shapes: dict[tuple[int, ...], int] = {}
        self.num_graphs, self.seconds = 0, 0.0
        self.reason: str | None = None
        self._wanted = Counter[tuple[int, ...]]()  # forwards of functions that are not compiled yet
        self._steps: dict[tuple[int, ...], Step] = {}  # torch stops compiling a function that has too many graphs
        self._kept: dict[int, StaticSpecCache] = {}
        self._lock = threading.Lock()

    @property
    def is_lent(self) -> bool:
        """Whether the next forward may write over what one has returned, as CUDA graphs do."""
        return self.reason is None and not is_host(self.model.device)

    def __call__(self, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        """What the step returns: of a model its output, and the best token of each column, `(batch, width)`.

        Args:
            shape: `(batch, width, columns)` and more: what a graph is made for.
        """
        if self.reason is not None:
            return self.as_written(inputs)
        num_runs = self.shapes.get(shape, 0)
        if num_runs >= (1 if is_host(self.model.device) else NUM_WARMING):
            return self._step_of(shape)(**inputs)
        start, known = time.perf_counter(), compat.num_compiled()
        try:
            found = self._step_of(shape)(**inputs)
        except Exception as error:  # compilers fail in many ways; what the forward itself raises comes below
            if raised_in_hook(error, self.model):  # it may not raise again
                self._steps.pop(self._function_of(shape), None)  # which torch may have given up
                raise
            found = self.as_written(inputs)
            self.reason = " ".join([type(error).__name__, *str(error).split("\n")[:2]])
            return found
        self.shapes[shape] = num_runs + 1
        self.num_graphs += compat.num_compiled() - known
        self.seconds += time.perf_counter() - start
        return found

    def width_for(self, shape: tuple[int, ...], wider: Sequence[int], flat_tokens: int) -> int:
        """The width that a forward runs at: its own, or one of `wider` that takes about the same time.

        So a method starts with one graph; the narrower ones are compiled once they were wanted `NUM_SERVED` times.

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
        found = next((other for other in serving if self._function_of((batch, other, *rest)) in self._steps), None)
        if found is None:
            return serving[-1]
        self._wanted[function] += 1
        return found if self._wanted[function] <= NUM_SERVED else width

    def as_written(self, inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        """The same, not compiled, for any shape."""
        return self._make_step(self.model)(**inputs)

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
        """Keep a cache that nobody uses any more for the next call, in the place of an earlier one."""
        if self.reason is None and cache.lengths:
            with self._lock:
                self._kept[part] = cache

    def _step_of(self, shape: tuple[int, ...]) -> Step:
        if not is_host(self.model.device):
            compat.mark_step_begin()
        function = self._function_of(shape)
        if function not in self._steps:
            self._steps[function] = compat.compiled(self._make_step(self.model), self.settings)
        return self._steps[function]

    def _function_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Which shapes are compiled together: unless the caller wants static shapes, those that differ in columns."""
        batch, width, _, *rest = shape
        return shape if self.settings.get("dynamic") is False else (batch, width, *rest)


@dataclass(frozen=True, slots=True)
class CompiledShapes:
    """The shapes of a call's forwards over a static cache, and what runs them."""

    fixed: FixedShapes
    compiled: CompiledForward

    def run(self, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
        """The two tensors that a step returns, which later forwards do not write over.

        Args:
            shape: as of `CompiledForward`; a width that is none of `fixed` is not compiled.
        """
        if shape[1] not in self.fixed.widths:
            return self.compiled.as_written(inputs)
        first, second = self.compiled(shape, inputs)
        return (first.clone(), second.clone()) if self.compiled.is_lent else (first, second)


class ForwardWidths:
    """How many columns the forwards of one call compute; any number where no shapes are fixed.

    Attributes:
        all (`tuple[int, ...]`): ascending; grows for good beyond what drafters announced.
    """

    def __init__(self, fixed: FixedShapes | None, compiled: CompiledForward | None) -> None:
        self.all = () if fixed is None else fixed.widths
        self._flat_tokens = 0 if fixed is None else fixed.flat_tokens
        self._compiled = compiled

    def of(self, num_columns: int, shape_of: Callable[[int], tuple[int, ...]], *, is_one: bool = False) -> int:
        """For a forward of `num_columns`; with `is_one` that of all forwards.

        Args:
            shape_of: from a width to what `CompiledForward` takes.
        """
        if self.all and num_columns > self.all[-1]:
            self.all = (*self.all, num_columns)
        if is_one:
            return max((num_columns, *self.all[-1:]))
        fitting = [width for width in self.all if width >= num_columns]
        if not fitting or self._compiled is None:
            return min(fitting, default=num_columns)
        return self._compiled.width_for(shape_of(fitting[0]), fitting[1:], self._flat_tokens)


def _model_step(model: Any) -> Step:
    """A model's forward, with the best token of each column."""

    def step(**inputs: Any) -> tuple[Any, torch.Tensor]:
        outputs = model(**inputs, return_dict=True)
        return outputs, outputs.logits.argmax(dim=-1)

    return step
