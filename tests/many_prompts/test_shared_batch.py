"""A batch that several callers fill: plain generation's tokens for each, and no caller waits for ever."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.errors import QueueFullError
from tests.helpers.support import plain

OPTIONS: dict[str, Any] = {"spec_method": "prompt_lookup", "max_new_tokens": 12, "do_sample": False}


class Gate:
    """A stopping criterion that keeps its text in the batch until it is opened."""

    row_safe = True

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.entered.set()
        assert self.opened.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture
def batch(model: Any) -> Iterator[SharedBatch]:
    made = SharedBatch(model, max_batch_size=1, max_queue=2, **OPTIONS)
    yield made
    made.close()


def check_no_frames(error: BaseException | None) -> None:
    """A note says where the error was raised; frames would keep the model's tensors as long as the error."""
    assert error is not None
    assert "Traceback" in "".join(error.__notes__) and error.__traceback__ is None
    assert error.__cause__ is None or error.__cause__.__traceback__ is None


def held(batch: SharedBatch) -> tuple[Gate, Future[Any]]:
    """The one place of a batch, taken."""
    gate = Gate()
    future = batch.submit({"input_ids": torch.tensor([[5, 6]]), "stopping_criteria": [gate]})
    assert gate.entered.wait(60)
    return gate, future


def test_prompts_of_many_threads_are_plain_generation_s(model: Any) -> None:
    prompts = [[5 + number, 6, 7, 5 + number, 6] for number in range(12)]
    batch = SharedBatch(model, max_batch_size=4, **OPTIONS)
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda prompt: batch.submit(prompt).result(60), prompts))
    batch.close()
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain(model, torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert result.token_ids == expected[0, len(prompt) :].tolist()


def test_what_is_wrong_with_one_prompt_is_its_own(batch: SharedBatch) -> None:
    assert isinstance(batch.submit({"input_ids": torch.tensor([[0.5]])}).result(60).error, hf_specdec.ConfigError)
    assert batch.submit([5, 6, 7]).result(60).error is None


def test_a_full_queue_refuses_until_a_place_is_given_up(batch: SharedBatch) -> None:
    gate, first = held(batch)
    waiting = [batch.submit([5, 6, 7]) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_queue is 2"):
        batch.submit([5, 6, 7])
    assert waiting[0].cancel()
    last = batch.submit([7, 6, 5])
    gate.opened.set()
    assert all(len(future.result(60).token_ids) == 12 for future in (first, waiting[1], last))
    with pytest.raises(CancelledError):
        waiting[0].result()


def test_what_stops_the_batch_is_raised_by_its_prompts_and_the_next_are_decoded(batch: SharedBatch) -> None:
    def fail(module: Any, args: Any) -> None:
        hook.remove()
        raise RuntimeError("out of memory")

    gate, first = held(batch)
    second = batch.submit([5, 6, 7])
    hook = batch.model.register_forward_pre_hook(fail)
    gate.opened.set()
    check_no_frames(first.exception(60))
    with pytest.raises(RuntimeError, match="out of memory"):
        first.result(60)
    assert second.result(60).error is None


@pytest.mark.parametrize("wrong", [{"spec_method": "magic"}, {"num_return_sequences": 3}, {"max_batch_size": 0}])
def test_wrong_options_of_the_batch_are_raised_by_its_prompts(model: Any, wrong: dict[str, Any]) -> None:
    batch = SharedBatch(model, **wrong)
    try:
        for _ in range(2):
            with pytest.raises(hf_specdec.ConfigError, match=next(iter(wrong))):
                batch.submit([5, 6]).result(timeout=60)
    finally:
        batch.close()


def test_an_exit_in_a_callback_ends_what_is_decoded_and_not_the_thread(model: Any) -> None:
    def leave(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise SystemExit(3)

    batch = SharedBatch(model, max_new_tokens=4, do_sample=False)
    try:
        ended = batch.submit({"input_ids": torch.tensor([[5, 6]]), "stopping_criteria": [leave]})
        check_no_frames(ended.exception(60))
        with pytest.raises(hf_specdec.SpecError, match="SystemExit ended the batch"):
            ended.result(timeout=60)
        assert len(batch.submit([7, 8, 9]).result(timeout=60).token_ids) == 4
    finally:
        batch.close()


def test_closing_leaves_nobody_waiting(model: Any) -> None:
    batch = SharedBatch(model, max_batch_size=1, **OPTIONS)
    gate, first = held(batch)
    second = batch.submit([5, 6, 7])
    closing = threading.Thread(target=batch.close)
    closing.start()
    while not batch.is_closing:
        pass
    gate.opened.set()
    closing.join(60)
    assert len(wait([first, second], 60).done) == 2
    for future in (first, second):
        with pytest.raises(hf_specdec.SpecError, match="the batch is closed"):
            future.result()
    with pytest.raises(hf_specdec.SpecError, match="the batch is closed"):
        batch.submit([5])
