"""Within transformers' `generate`: a decoding method as its `custom_generate`, and the kernels of its own loops."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.call.request import Request
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat.compiling import compile_settings
from hf_specdec.compat.generation import ModelOutput
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.model_state import state_of
from hf_specdec.kernels.cpu import HALVES
from hf_specdec.kernels.cpu_kernels import CpuKernels


class CustomGenerate:
    """Hands the call that transformers prepared to a function.

    Args:
        request: of the call.
        decode: called with the request, which has the prepared call then.
        streamer (*optional*): a transformers streamer.
    """

    def __init__(self, request: Request, decode: Callable[[Request], Any], streamer: Any = None) -> None:
        self._request, self._decode = request, decode
        self._stats: SpecStats | None = None
        self._streamer = streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode what transformers prepared. Its arguments; `(batch, length)` token ids."""
        request = self._request
        call = Call(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            self._streamer,
            request.user_callbacks,
        )
        output = self._decode(replace(request, model=model, prepared=call))
        self._stats = self._stats or getattr(output, "spec_stats", None)
        return output

    def within(self, generate: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Output of `generate(**arguments)`, with `spec_stats` where the model's class puts together one of its own.

        They are those of the first text that was decoded.
        """
        output = generate(**arguments)
        if isinstance(output, ModelOutput) and not hasattr(output, "spec_stats") and self._stats:
            return with_stats(output, self._stats)
        return output


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
