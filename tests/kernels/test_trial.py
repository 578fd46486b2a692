"""Which way is faster is found by timing both, in halves before the first result."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.kernels import cpu
from hf_specdec.kernels.linear import LinearForward
from tests.helpers.support import PROMPT
from tests.kernels.layer_cases import has_core, inside, layer, tokens

pytestmark = has_core


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_way_is_found_by_timing_both(is_faster: bool) -> None:
    """One outlier and a slow beginning decide nothing."""
    trial, ways = cpu.Trial(), []
    while not trial.is_over:
        is_ours = trial.turn()
        ways.append(is_ours)
        seconds = 1.0 if is_ours == is_faster else 1.2
        trial.add(is_ours, (50.0 if len(ways) in (1, 2, 9, 10) else seconds) / 1_000_000)
    assert trial.is_ours == is_faster
    assert ways.count(True) == ways.count(False) == cpu.SAMPLES


def test_a_trial_of_long_calls_is_short() -> None:
    """A large output head takes tenths of a second by the slower way."""
    trial, num_calls, before = cpu.Trial(), 0, cpu.tried.count
    while not trial.is_over:
        is_ours = trial.turn()
        trial.add(is_ours, 0.05 if is_ours else 0.3, 1_000)
        num_calls += 1
    assert trial.is_ours
    assert num_calls == 2 * cpu.FEWEST == cpu.tried.count - before


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who computed each product: the core, or torch, which takes as long by this clock; nothing is known before."""
    cpu.trial.cache_clear()
    output: list[str] = []
    for way in ("_product", "torchs"):
        original = getattr(LinearForward, way)

        def noting(*args: Any, name: str = way, original: Any = original) -> torch.Tensor:
            output.append(name)
            result: torch.Tensor = original(*args)
            return result

        monkeypatch.setattr(LinearForward, way, noting)
    clock = itertools.count(step=1e-4)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: next(clock))
    yield output
    cpu.trial.cache_clear()


def test_a_size_is_tried_once_and_then_computed_by_the_faster(ways: list[str]) -> None:
    module = layer(264, 300)
    for _ in range(2 * cpu.SAMPLES):
        inside(module, tokens(3, 264))
    assert ways == ["_product", "torchs"] * cpu.SAMPLES
    ways.clear()
    for _ in range(3):
        inside(module, tokens(4, 264))
    assert ways == ["torchs"] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 300])
def test_the_core_computes_all_halves(dtype: torch.dtype, count: int, ways: list[str]) -> None:
    for num_out in (8, 300):
        inside(layer(264, num_out, dtype), tokens(count, 264, dtype=dtype))
    assert ways == ["_product"] * 2


@pytest.mark.parametrize("method", ["auto", "prompt_lookup"])
def test_the_first_call_of_a_process_writes_in_bf16_what_the_second_does(method: str, ways: list[str]) -> None:
    """Scores too, to the last bit; `auto` where it is to draft alike."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype=torch.bfloat16)
    how = {"spec_method": method, "spec_config": {"deterministic": True} if method == "auto" else {}}
    first, second = (
        model.generate(
            PROMPT, max_new_tokens=24, do_sample=False, output_scores=True, return_dict_in_generate=True, **how
        )
        for _ in range(2)
    )
    assert "_product" in ways
    assert torch.equal(torch.stack(first.scores), torch.stack(second.scores))
    assert torch.equal(first.sequences, second.sequences)
