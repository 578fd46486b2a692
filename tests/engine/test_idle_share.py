"""Share of a step in which a device has no work, and what the host does while it has some."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.common.stats import SpecStats
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.recorded.call_forwards import CallForwards
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from tests.helpers.device_clock import measure_steps

FORWARD = 1e-3  # seconds
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"spec_method": "plain"},
    "auto": {"spec_method": "auto", "spec_config": {"pool": "request"}},
    "auto, sampled": {"spec_method": "auto", "spec_config": {"pool": "request"}, "do_sample": True},
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(dtype="fp32", device=torch.device("cpu"))


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
def test_texts_over_the_emulated_device_are_plain_generates(loaded: LoadedModel, way: str) -> None:
    """`measure_steps` raises where a text differs; times are for `python -m tests.helpers.device_clock` to print."""
    steps = measure_steps(loaded, FORWARD, num_texts=1, **WAYS[way])
    assert steps.busy >= FORWARD
    assert steps.seconds > 0.9 * steps.busy  # forwards that begin before the read are counted ahead of their time


@pytest.mark.parametrize(("kind", "method"), [(Budget, "record"), (SpecStats, "record_step")])
def test_each_steps_costs_and_counts_are_kept_once_the_next_forward_is_launched(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    """And those of the last step in the end."""
    hf_specdec.capability(loaded.model)  # by forwards that are not noted
    monkeypatch.setattr(CallForwards, "is_usual", property(lambda self: True, lambda self, value: None), raising=False)
    events: list[str] = []

    def noted(name: str, kind: type, method: str) -> None:
        original = getattr(kind, method)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            events.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(kind, method, call)

    def pairs(events: Sequence[str]) -> list[str]:
        return ["forward", *["forward", "keep"] * (len(events) // 2 - 1), "keep"]

    noted("forward", ModelRunner, "forward")
    noted("keep", kind, method)
    ids = torch.arange(5, 30)[None]
    loaded.model.generate(ids, max_new_tokens=8, do_sample=False, **WAYS["auto"])
    assert len(events) > 4
    assert events == pairs(events)
