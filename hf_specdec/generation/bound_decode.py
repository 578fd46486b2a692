"""The decoding method of one call of `generate`, with what transformers would drop on the way to it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.stats import SpecStats
from hf_specdec.common.temporary_hooks import temporary_hooks
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.decode import decode_call
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.plain_reasons import OWN_LOOP
from hf_specdec.generation.arguments import prompt_length
from hf_specdec.request.request import Request


class BoundDecode:
    """Our decoding loop as transformers' `custom_generate`.

    Args:
        request: what the call asked for; `None` for plain decoding.
        streamer (*optional*): a transformers streamer.
    """

    def __init__(self, request: Request | None, streamer: Any = None) -> None:
        self.request = request
        self.encoder_inputs: Any = None
        self.was_called = False
        self._stats: SpecStats | None = None
        self.streamer = _EndedOnce(streamer) if streamer is not None else None
        self._callers = () if request is None else request.callers
        self._callers += () if streamer is None else (streamer,)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode what transformers prepared. Its arguments; (N, T) token ids."""
        call = Call(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            self.streamer,
            self._callers,
        )
        self.was_called = True
        return self._run(call)

    def _run(self, call: Call) -> Any:
        output = decode_call(call, self.request, self.encoder_inputs)
        self._stats = self._stats or getattr(output, "spec_stats", None)
        return output

    def within(self, model: PreTrainedModel, generate: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Output of `generate(**kwargs)`, with `spec_stats` where the model's class puts together one of its own.

        They are those of the first text that was decoded. A class that decodes by a loop of its own, and may refuse
        `custom_generate`, is left to it.
        """
        try:
            output = generate(**kwargs)
        except ValueError as error:
            if self.was_called or "'custom_generate'" not in str(error):
                raise
            output = generate(**{name: value for name, value in kwargs.items() if name != "custom_generate"})
        if not self.was_called:
            state_of(model).warn_once(f"{type(model).__name__} decodes without speculation: {OWN_LOOP}")
            self._stats = SpecStats(method=(self.request and self.request.name) or "", plain_reason=OWN_LOOP)
            ids = getattr(output, "sequences", output)
            if isinstance(ids, torch.Tensor) and ids.ndim == 2:
                self._stats.num_tokens = ids[:, prompt_length(model, kwargs) :].numel()
        if isinstance(output, compat.ModelOutput) and not hasattr(output, "spec_stats") and self._stats is not None:
            return with_stats(output, self._stats)
        return output

    @contextlib.contextmanager
    def ending_streamer(self) -> Iterator[None]:
        """End the streamer where an error leaves the block: nobody waits for a text that will not come."""
        try:
            yield
        except BaseException:
            if self.streamer is not None and not self.streamer.ended:
                self.streamer.end()
            raise

    @contextlib.contextmanager
    def reading_encoder(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Iterator[None]:
        """Keep what the encoder reads, for a draft model that has an encoder of its own.

        Whisper's own `generate` hands transformers' one piece of a long recording after the other, of the rows that are
        left: within the block, each input of this thread takes the place of the one before.
        """
        if not model.config.is_encoder_decoder:
            yield
            return
        given, name = kwargs.get("inputs"), model.main_input_name
        self.encoder_inputs = given if given is not None else kwargs.get(name)
        if self.request is None or self.request.assistant_model is None:
            yield
            return
        thread = threading.get_ident()

        def keep(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                names = (name, getattr(encoder, "main_input_name", name))  # a composed model's encoder has its own
                read = [*(kwargs.get(own) for own in names), *args[:1]]
                self.encoder_inputs = next((value for value in read if value is not None), self.encoder_inputs)

        with temporary_hooks(before=[(model.get_encoder(), keep)]):
            yield


class PreparedDecode(BoundDecode):
    """Hands the prepared call out, with what was asked for, instead of decoding it."""

    def _run(self, call: Call) -> Any:
        return call, self.request


class _EndedOnce:
    """A streamer that remembers whether it was ended."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self.ended = streamer, False

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on."""
        self._streamer.put(value)

    def end(self) -> None:
        """End the streamer; whether or not that raises, it was asked to."""
        self.ended = True
        self._streamer.end()
