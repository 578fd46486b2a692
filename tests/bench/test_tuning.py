"""`measure_costs`: whatever a model's own generation configuration says, and leaving the model as it was."""

from typing import Any

import pytest
from transformers import GenerationMixin

import hf_specdec
from hf_specdec.tools.bench.tuning import measure_costs
from tests.helpers.support import PROMPT
from tests.helpers.zoo import FAMILIES, build

SETTINGS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4},
    "several sequences": {"num_return_sequences": 2, "do_sample": True},
    "a static cache": {"cache_implementation": "static"},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "a length": {"max_length": 3},
}


def measured(model: Any) -> dict[int, float]:
    return measure_costs(model, context_length=12, seconds=1.0, rounds=1).seconds[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_model_are_left_out(name: str) -> None:
    model = build(FAMILIES["llama"])
    for setting, value in SETTINGS[name].items():
        setattr(model.generation_config, setting, value)
    kept, before = model.generation_config, model.generation_config.to_dict()
    assert max(measured(model)) > 1
    assert model.generation_config is kept
    assert kept.to_dict() == before


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_model_is_enabled_afterwards_if_it_was_before(family: str) -> None:
    model = build(FAMILIES[family])
    measured(model)
    assert "generate" not in vars(model)
    assert model.generate.__func__ is GenerationMixin.generate
    if family == "llama":
        enabled = hf_specdec.enable(model)
        measured(enabled)
        assert enabled.generate(PROMPT, max_new_tokens=2, spec_method="plain").shape[1] == PROMPT.shape[1] + 2
