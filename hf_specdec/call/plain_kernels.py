"""Kernels of speculative forwards for transformers' own loops, so that both round alike."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.compat.compiling import compile_settings
from hf_specdec.engine.model_state import state_of
from hf_specdec.kernels.cpu import HALVES
from hf_specdec.kernels.cpu_kernels import CpuKernels


class PlainSteps:
    """The forwards of one call of transformers' `generate`: those after the prompt's have the kernels.

    Attributes:
        model (`PreTrainedModel`): whose call it is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._kernels, self._block = model, CpuKernels(model), contextlib.ExitStack()

    def prefill(
        self, compute: Callable[[], Any], generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute a prompt's forward, and give the kernels to those that follow; compiled steps get none of them."""
        if compile_settings(self.model, generation_config, model_kwargs) is not None:
            return compute()
        self.close()
        with self._kernels.of_prompts:
            outputs = compute()
        self._block.enter_context(self._kernels)
        return outputs

    def close(self) -> None:
        """Take the kernels away."""
        self._block.close()


plain_steps: ContextVar[PlainSteps | None] = ContextVar("plain_steps", default=None)  # of this thread's call


@contextlib.contextmanager
def plain_kernels(model: PreTrainedModel) -> Iterator[None]:
    """A block in which plain decoding of an enabled model has the kernels: in bf16 and fp16, or as `enable` says."""
    is_used = state_of(model).plain_kernels
    if not (model.dtype in HALVES if is_used is None else is_used):
        yield
        return
    steps = PlainSteps(model)
    token = plain_steps.set(steps)
    try:
        yield
    finally:
        plain_steps.reset(token)
        steps.close()
