"""Watches one call of `generate`: times of tokens, steps, and a way to stop it; and spells the tokens."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from hf_specdec.common.observer import SpecStep

NUM_CONTEXT = 8  # tokens of the prompt that decide how the first new ones are spelled
INCOMPLETE = "\ufffd"  # what a decoder writes for a part of a character


class Stop(threading.Event, StoppingCriteria):
    """An event that ends texts at their next token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        """`(batch,)`: whether each text ends."""
        return torch.full((input_ids.shape[0],), self.is_set(), device=input_ids.device)  # type: ignore[return-value]


class Recorder:
    """Takes the time of every token, in seconds from the start without what observing takes, and keeps the steps."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.steps: list[SpecStep] = []
        self._observing = 0.0
        self._has_prompt = False
        self._start = time.perf_counter()

    def kwargs(self, *, observes: bool) -> dict[str, Any]:
        """Arguments of `generate`; the clock starts here."""
        kwargs: dict[str, Any] = {"streamer": self, "stopping_criteria": StoppingCriteriaList([self.stop])}
        if observes:
            kwargs["spec_observer"] = self.observe
        self._start = time.perf_counter()
        return kwargs

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then the tokens."""
        now = time.perf_counter()
        if self._has_prompt:
            self.times += [now - self._start - self._observing] * value.numel()
            self.token_ids += value.reshape(-1).tolist()
        self._has_prompt = True

    def end(self) -> None:
        """The text has ended."""

    def observe(self, step: SpecStep) -> None:
        """Keep a step, and leave the time of the earlier ones' observing out of the clock from here on."""
        began = time.perf_counter()
        self.steps.append(step)
        self._observing = step.observer_seconds + time.perf_counter() - began


class Words:
    """Texts of the tokens of one call, which continue the tokens of a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.context = list(prompt_ids[-NUM_CONTEXT:])

    def word(self, token: int) -> str:
        """Text of one token alone."""
        return self.decode([token])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text that each token adds; a character of several tokens belongs to the last of them."""
        ids, pieces = [*self.context, *tokens], list[str]()
        start, end = 0, len(self.context)  # the last complete piece, which decides how the next one is spelled
        for place in range(len(self.context), len(ids)):
            before, now = self.decode(ids[start:end]), self.decode(ids[start : place + 1])
            is_last = place == len(ids) - 1
            if now.endswith(INCOMPLETE) and not is_last and place - end < 4:
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            start, end = max(start, end - 1), place + 1
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones too."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)
