"""`deterministic`: the same call has the same text, drafts and stats, in any precision and whatever the clock says."""

import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import PROMPT, noisy_copy

COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_forwards", "num_tokens")
CALL: dict[str, Any] = {
    "max_new_tokens": 48,
    "do_sample": False,
    "return_dict_in_generate": True,
    "spec_method": "auto",
}


@pytest.fixture
def half(model: Any) -> Any:
    """The model in bf16, never used before."""
    return hf_specdec.enable(copy.deepcopy(hf_specdec.disable(model)).to(torch.bfloat16))


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every step takes another time."""
    times = itertools.accumulate(itertools.cycle([0.001, 0.3, 0.02, 0.0004, 1.5]))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))


def drafts_of(model: Any, prompt: torch.Tensor = PROMPT, **kwargs: Any) -> tuple[Any, ...]:
    """Text, every step's tree, and the counters."""
    steps: list[Any] = []
    output = model.generate(prompt, **CALL, **kwargs, spec_observer=steps.append)
    trees = [(step.tree.tokens, step.tree.parents, step.accepted) for step in steps]
    return output.sequences.tolist(), trees, [getattr(output.spec_stats, name) for name in COUNTS]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_same_call_drafts_the_same(half: Any, rows: int, request: pytest.FixtureRequest) -> None:
    prompt, config = PROMPT.repeat(rows, 1), {"deterministic": True}
    first = drafts_of(half, prompt, spec_config=config)
    assert first[2][1] > 0
    half.generate(PROMPT, **CALL)  # learns and remembers
    request.getfixturevalue("slow_clock")
    assert drafts_of(half, prompt, spec_config=config) == first


def test_a_draft_model_makes_no_difference(half: Any, request: pytest.FixtureRequest) -> None:
    draft, config = noisy_copy(half), {"deterministic": True}
    first = drafts_of(half, spec_config=config, assistant_model=draft)
    request.getfixturevalue("slow_clock")
    assert drafts_of(half, spec_config=config, assistant_model=draft) == first


@pytest.fixture
def torch_is_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_it_is_the_default_where_torch_is_deterministic(
    half: Any, torch_is_deterministic: None, request: pytest.FixtureRequest
) -> None:
    first = drafts_of(half)
    request.getfixturevalue("slow_clock")
    assert drafts_of(half) == first


def test_without_it_sizes_follow_the_clock(half: Any, request: pytest.FixtureRequest) -> None:
    """Else the tests above could not fail."""
    config = {"pool": "request", "deterministic": False}
    first = drafts_of(half, spec_config=config)
    request.getfixturevalue("slow_clock")
    assert drafts_of(half, spec_config=config)[1] != first[1]
