"""Several threads on one model are as safe as with plain `generate`: nothing of a call is shared or global."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers.cover import wide_but
from tests.helpers.support import DRAFTS, PROMPT, plain, speculative

PROMPTS = [PROMPT.roll(shift, dims=1)[:, : 30 - 4 * shift] for shift in range(4)]
CALLS = 3


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns a thousand times more often than usual, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def expected_texts(model: Any) -> list[list[int]]:
    return [plain(model, prompt, max_new_tokens=24, do_sample=False)[0].tolist() for prompt in PROMPTS]


def run_threads(jobs: list[Callable[[], list[int]]]) -> list[list[list[int]]]:
    """Each job `CALLS` times in its own thread, all started at once; an exception in one of them is raised here."""
    results: list[list[list[int]]] = [[] for _ in jobs]
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def work(number: int, job: Callable[[], list[int]]) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        try:
            for _ in range(CALLS):
                results[number].append(job())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def job(model: Any, prompt: torch.Tensor, method: dict[str, Any]) -> Callable[[], list[int]]:
    def generate() -> list[int]:
        call = speculative if method else plain
        ids: list[int] = call(model, prompt, max_new_tokens=24, do_sample=False, **method)[0].tolist()
        return ids

    return generate


@pytest.mark.parametrize("family", wide_but(["gemma3"], ["llama", "gemma3"]))
def test_calls_side_by_side_on_one_model_do_not_mix(zoo: Callable[[str], Any], family: str) -> None:
    """Trees of different shapes in two threads, prompt lookup in a third, plain decoding in the fourth."""
    model = zoo(family)
    expected = expected_texts(model)
    methods = [DRAFTS["oracle"](expected[0]), DRAFTS["random_trees"](expected[1]), DRAFTS["prompt_lookup"]([]), {}]
    jobs = [job(model, prompt, method) for prompt, method in zip(PROMPTS, methods, strict=True)]
    for number, texts in enumerate(run_threads(jobs)):
        assert texts == [expected[number]] * CALLS


def test_a_model_met_first_by_two_threads_is_probed_safely() -> None:
    """The first calls ever made on a model, at the same moment."""
    import hf_specdec
    from tests.helpers.zoo import FAMILIES, build

    model = hf_specdec.enable(build(FAMILIES["llama"]))
    expected = expected_texts(model)
    jobs = [job(model, prompt, DRAFTS["oracle"](text)) for prompt, text in zip(PROMPTS, expected, strict=True)]
    assert [texts[0] for texts in run_threads(jobs)] == expected


def test_a_shared_pool_may_be_used_by_several_threads(model: Any) -> None:
    """The pool outlives calls and belongs to the model, so all threads write to it."""
    expected = expected_texts(model)
    method = {"spec_method": "prompt_lookup", "spec_config": {"pool": "shared"}}
    jobs = [job(model, prompt, method) for prompt in PROMPTS]
    for number, texts in enumerate(run_threads(jobs)):
        assert texts == [expected[number]] * CALLS
