"""Share of a step in which a device has no work, and what the host does while it has some."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_specdec.engine.cost.budget import Budget
from hf_specdec.forward.target.model_runner import ModelRunner
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from tests.helpers.device_clock import measure_steps

FORWARD = 6.1e-3  # seconds, of a model of 7 billion parameters on an H100
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({"spec_method": "plain"}, 0.03),  # the next forward is launched before the host reads a token
    "auto": ({"spec_method": "auto", "spec_config": {"pool": "request"}}, 0.45),  # 0.22 on one idle core of an AMD EPYC
    "auto, sampled": ({"spec_method": "auto", "spec_config": {"pool": "request"}, "do_sample": True}, 0.45),
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(dtype="fp32", device=torch.device("cpu"))


@pytest.mark.parametrize("way", WAYS)
def test_the_device_has_work_for_most_of_a_step(loaded: LoadedModel, way: str) -> None:
    options, most = WAYS[way]
    assert measure_steps(loaded, FORWARD, num_texts=1, **options).idle_share <= most


def test_the_budget_learns_each_steps_costs_once_the_next_forward_is_launched(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the last step in the end."""
    events: list[str] = []

    def noted(name: str, kind: type, method: str) -> None:
        original = getattr(kind, method)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            events.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(kind, method, call)

    def pairs(found: Sequence[str]) -> list[str]:
        return ["forward", *["forward", "learn"] * (len(found) // 2 - 1), "learn"]

    noted("forward", ModelRunner, "forward")
    noted("learn", Budget, "record")
    ids = torch.arange(5, 30)[None]
    loaded.model.generate(ids, max_new_tokens=8, do_sample=False, spec_method="auto")
    assert len(events) > 4
    assert events == pairs(events)
