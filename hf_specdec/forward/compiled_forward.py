"""A model's forwards over a static cache, compiled once for each shape, with the best token of every column inside.

A shape that cannot be compiled runs as it is written, and the reason is kept. Knows nothing of trees or texts.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.transfer import is_host

__all__ = ["CompiledForward"]

Step = Callable[..., tuple[Any, torch.Tensor]]


class CompiledForward:
    """Runs one model's forwards. Kept on the model, so that later calls find what was compiled.

    Args:
        settings: keyword arguments of `torch.compile`.

    Attributes:
        shapes: what was compiled: `(batch, width, columns)` of each graph.
        seconds (`float`): of the first forward of each shape, which compiles.
        reason (`str | None`): why forwards run as they are written, once that was found out.
    """

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
        self.model, self.settings = model, dict(settings)
        self.shapes: set[tuple[int, ...]] = set()
        self.seconds = 0.0
        self.reason: str | None = None
        self._steps: dict[tuple[int, ...], Step] = {}  # by shape: torch stops compiling what has too many graphs
        self._kept: tuple[tuple[int, int], StaticSpecCache] | None = None
        self._lock = threading.Lock()

    def __call__(self, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[Any, torch.Tensor | None]:
        """The model's output, and the best token of each column, `(batch, width)`; `None` where that was not computed.

        Args:
            shape: `(batch, width, columns)`: what a graph is made for.
        """
        if self.reason is not None:
            return self.model(**inputs, return_dict=True), None
        if shape in self.shapes:
            return self._step_of(shape)(**inputs)
        start = time.perf_counter()
        try:
            found = self._step_of(shape)(**inputs)
        except Exception as error:  # noqa: BLE001 compilers fail in many ways; what the forward itself raises comes below
            outputs = self.model(**inputs, return_dict=True)
            self.reason = " ".join([type(error).__name__, *str(error).split("\n")[:2]])
            return outputs, None
        self.shapes.add(shape)
        self.seconds += time.perf_counter() - start
        return found

    def take_cache(self, batch: int, capacity: int) -> StaticSpecCache | None:
        """The cache that the last call has left, empty, where it has this shape and no other call has taken it.

        A CUDA graph is recorded for the addresses of its buffers. Those made in inference mode are of no use outside.
        """
        with self._lock:
            if self._kept is None or self._kept[0] != (batch, capacity):
                return None
            (_, cache), self._kept = self._kept, None
        if cache.is_inference and not torch.is_inference_mode_enabled():
            return None
        cache.empty()
        return cache

    def keep_cache(self, cache: StaticSpecCache) -> None:
        """Keep a cache that nobody uses any more for the next call, in the place of an earlier one."""
        if self.reason is None and cache.lengths:
            with self._lock:
                self._kept = ((len(cache.lengths), cache.capacity), cache)

    def _step_of(self, shape: tuple[int, ...]) -> Step:
        if not is_host(self.model.device):
            compat.mark_step_begin()
        if shape not in self._steps:
            self._steps[shape] = compat.compiled(_step_function(self.model), self.settings)
        return self._steps[shape]


def _step_function(model: PreTrainedModel) -> Step:
    """A function of one shape."""

    def step(**inputs: Any) -> tuple[Any, torch.Tensor]:
        outputs = model(**inputs, return_dict=True)
        return outputs, outputs.logits.argmax(dim=-1)

    return step
