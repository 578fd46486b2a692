"""Within transformers' `generate`: a decoding method as its `custom_generate`, and the kernels of its own loops."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.call.request import Request, prompt_length
from hf_specdec.call.rules import OWN_LOOP
from hf_specdec.common.stats import CallPlan, SpecStats
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
        self._was_called = False
        self._streamer = _EndedOnce(streamer) if streamer is not None else None

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
        self._was_called = True
        output = self._decode(replace(request, model=model, prepared=call))
        self._stats = self._stats or getattr(output, "spec_stats", None)
        return output

    def within(self, generate: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Output of `generate(**arguments)`, with `spec_stats` where the model's class puts together one of its own.

        They are those of the first text that was decoded. A class that decodes by a loop of its own, and may refuse
        `custom_generate`, is left to it.
        """
        try:
            output = generate(**arguments)
        except ValueError as error:
            if self._was_called or "'custom_generate'" not in str(error):
                raise
            output = generate(**{name: value for name, value in arguments.items() if name != "custom_generate"})
        if not self._was_called:
            self._stats = self._stats_of_own_loop(output, arguments)
        if isinstance(output, ModelOutput) and not hasattr(output, "spec_stats") and self._stats:
            return with_stats(output, self._stats)
        return output

    def _stats_of_own_loop(self, output: Any, arguments: dict[str, Any]) -> SpecStats:
        """Counters of a call that the model's class has decoded by a loop of its own."""
        model, method = self._request.model, self._request.method.name
        note = f"{type(model).__name__} decodes without speculation: {OWN_LOOP}"
        state_of(model).warn_once(note)
        plan = CallPlan(way="plain", reason=OWN_LOOP, method=method, loop="transformers", notes=(note,))
        stats, ids = SpecStats.of(plan), getattr(output, "sequences", output)
        if isinstance(ids, torch.Tensor) and ids.ndim == 2:
            stats.num_tokens = ids[:, prompt_length(model, arguments) :].numel()
        return stats

    def ending_streamer(self) -> contextlib.AbstractContextManager[Any]:
        """A block that ends the streamer where an error leaves it: its reader waits for a text that will not come."""
        return contextlib.nullcontext() if self._streamer is None else self._streamer


class _EndedOnce:
    """A streamer that remembers whether it was ended, and a block that ends it where an error leaves it."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self.ended = streamer, False

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on."""
        self._streamer.put(value)

    def end(self) -> None:
        """End the streamer; whether or not that raises, it was asked to."""
        self.ended = True
        self._streamer.end()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.ended:
            self.end()


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
