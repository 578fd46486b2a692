"""A streamer is given what plain decoding gives it: the prompt once, each token once, and one end."""

import contextlib
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.helpers.support import PROMPT, assert_same_run, both, plain, run, speculative
from tests.promise.conftest import Draft


class Recorder(BaseStreamer):
    """Remembers each call; may fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.puts: list[tuple[torch.dtype, list[Any]]] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "nothing comes after the end"
        assert value.device.type == "cpu"
        self.puts.append((value.dtype, value.tolist()))
        if len(self.puts) == self.fail_at:
            raise RuntimeError("the screen is gone")

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_streamer_gets_the_same_calls(model: Any, draft: Draft, do_sample: bool) -> None:
    reference, ours = both(model, lambda: {"streamer": Recorder(), "do_sample": do_sample}, draft)
    assert_same_run(ours, reference)
    assert ours.kwargs["streamer"].puts == reference.kwargs["streamer"].puts
    assert ours.kwargs["streamer"].ends == reference.kwargs["streamer"].ends == 1


class Watcher(StoppingCriteria):
    """Remembers how many tokens the streamer had been given at each call; may fail at one of them."""

    def __init__(self, streamer: Recorder, fail_at: int | None) -> None:
        self.streamer, self.fail_at = streamer, fail_at
        self.streamed: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.streamed.append(len(self.streamer.puts))
        if len(self.streamed) == self.fail_at:
            raise KeyboardInterrupt
        return torch.tensor([False])


@pytest.mark.parametrize("fail_at", [None, 4])
def test_criteria_are_asked_before_the_token_is_streamed(model: Any, draft: Draft, fail_at: int | None) -> None:
    """So a token at which a criterion fails is not shown."""
    expected = run(model, plain, dict).ids
    streamers, watchers = [Recorder(), Recorder()], []
    for streamer, method in zip(streamers, ({}, draft(expected)), strict=True):
        watchers.append(Watcher(streamer, fail_at))
        generate = speculative if method else plain
        with pytest.raises(KeyboardInterrupt) if fail_at else contextlib.nullcontext():
            call = {"streamer": streamer, "stopping_criteria": [watchers[-1]]}
            generate(model, PROMPT, max_new_tokens=16, do_sample=False, **call, **method)
    assert watchers[1].streamed == watchers[0].streamed
    assert streamers[1].puts == streamers[0].puts


def test_a_batch_is_streamed_as_plain_decoding_streams_it(model: Any) -> None:
    def puts(**method: Any) -> list[Any]:
        streamer = Recorder()
        model.generate(PROMPT.repeat(2, 1), max_new_tokens=4, do_sample=False, streamer=streamer, **method)
        assert streamer.ends == 1
        return streamer.puts

    assert puts(spec_method="prompt_lookup") == puts()
