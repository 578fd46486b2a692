"""Limits of Mamba-2's time step: drafts are computed without them, as plain generation's forwards of one token are."""

import threading
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.time_steps import TimeStepLimits
from tests.helpers.drafts import RandomTreeDrafter
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo_wide import build, shrunk

LOWEST = 0.8  # most time steps of these random models are shorter
FAMILIES = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")

pytestmark = pytest.mark.filterwarnings("ignore")  # what default configurations leave out


def limited(model_type: str) -> tuple[Any, list[Any]]:
    """A random model and its layers with a limit."""
    model = build(shrunk(model_type), "causal", 0.15)
    layers = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    for layer in layers:
        layer.time_step_limit = (LOWEST, float("inf"))
    assert layers
    return model, layers


@pytest.mark.parametrize("model_type", FAMILIES)
def test_drafts_are_computed_without_the_limit_and_prompts_with_it(model_type: str) -> None:
    model, layers = limited(model_type)
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = plain(model, PROMPT, **options)
    hf_specdec.enable(model)

    def drafter() -> RandomTreeDrafter:
        return RandomTreeDrafter(expected.sequences[0].tolist(), hit_rate=0.8)

    for method in ("prompt_lookup", drafter):
        output = model.generate(PROMPT, **options, spec_method=method)
        assert output.spec_stats.tier == "tree"
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(torch.cat(output.logits), torch.cat(expected.logits), atol=2e-3, rtol=1e-3)
    assert output.spec_stats.num_accepted_tokens > 0
    assert all(type(layer.time_step_limit) is tuple for layer in layers)
    assert {layer.time_step_limit for layer in layers} == {(LOWEST, float("inf"))}


def test_blocks_of_two_threads_overlap() -> None:
    """Each lifts the limit for itself, as long as its own block lasts; a third thread sees the limit throughout."""
    model, (layer, *_) = limited("mamba2")
    seen: dict[str, list[float]] = {"first": [], "second": [], "without": []}
    steps = threading.Barrier(3, timeout=30)

    def read(name: str) -> None:
        seen[name].append(layer.time_step_limit[0])
        steps.wait()

    def first() -> None:
        with TimeStepLimits(model, ModelFacts()):
            read("first")  # alone
            read("first")  # with the second
        read("first")  # the second alone

    def second() -> None:
        read("second")
        with TimeStepLimits(model, ModelFacts()):
            read("second")
            read("second")

    def without() -> None:
        for _ in range(3):
            read("without")

    threads = [threading.Thread(target=run) for run in (first, second, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first": [0.0, 0.0, LOWEST], "second": [LOWEST, 0.0, 0.0], "without": [LOWEST] * 3}
    assert type(layer.time_step_limit) is tuple
    assert layer.time_step_limit == (LOWEST, float("inf"))


def test_no_layer_is_touched_without_a_limit_or_from_elsewhere() -> None:
    """A layer of the caller's with an attribute of this name may use it otherwise."""
    model, (layer, *rest) = limited("mamba2")
    layer.time_step_limit = own = (0.0, float("inf"))
    model.add_module("callers", foreign := torch.nn.Identity())
    foreign.time_step_limit = "short"
    with TimeStepLimits(model, ModelFacts()):
        assert layer.time_step_limit is own
        assert foreign.time_step_limit == "short"
        assert all(other.time_step_limit[0] == 0.0 for other in rest)
