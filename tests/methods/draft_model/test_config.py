"""The parameters of draft-model speculation: every way to write them, and what is refused."""

from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_model.config import DraftModelConfig

EXPECTED = DraftModelConfig(
    draft_len=6, draft_model_device_list=[0], target_model_device_list=[1], use_logits=True, confidence_threshold=None
)


def test_the_defaults_are_a_chain_that_learns_when_to_stop() -> None:
    config = DraftModelConfig()
    assert (config.draft_len, config.start_len, config.num_branches, config.node_budget) == (None, 4, 1, 16)
    assert config.use_logits is False
    assert config.confidence_threshold is None


@pytest.mark.parametrize(
    "value",
    [
        EXPECTED,
        [6, [0], [1], True],
        "[6,[0],[1],True]",
        {"draft_len": 6, "draft_model_device_list": [0], "target_model_device_list": [1], "use_logits": True},
        {
            "max_draft_len": 6,
            "draft_model_device_list": [0],
            "target_model_device_list": [1],
            "use_logits": True,
            "confidence_threshold": "auto",
        },
        {
            "num_assistant_tokens": 6,
            "draft_model_device_list": [0],
            "target_model_device_list": [1],
            "use_logits": True,
            "assistant_confidence_threshold": None,
        },
    ],
)
def test_all_ways_to_write_a_configuration_mean_the_same(value: Any) -> None:
    assert DraftModelConfig.parse(value) == EXPECTED


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_use_logits_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="`use_logits` must be True or False"):
        DraftModelConfig(use_logits=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.4", "high", True, [0.4]])
def test_the_threshold_is_a_probability(value: Any) -> None:
    with pytest.raises(ConfigError, match="`confidence_threshold` must be a probability") as error:
        DraftModelConfig(confidence_threshold=value)
    assert "0.0 to always draft" in error.value.remedy


@pytest.mark.parametrize("value", [0, 0.0, 0.4, 1, 1.0])
def test_the_threshold_may_be_any_probability(value: Any) -> None:
    assert DraftModelConfig(confidence_threshold=value).confidence_threshold == value


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"draft_len": 7}, 7),
        ({"draft_len": 5, "num_branches": 3}, 15),
        ({"draft_len": 10, "num_branches": 8}, 32),
        ({"draft_len": 10, "num_branches": 8, "max_nodes": 64}, 64),
        ({"max_nodes": 3}, 3),
    ],
)
def test_the_node_budget_follows_from_length_and_branches(fields: dict[str, int], budget: int) -> None:
    assert DraftModelConfig(**fields).node_budget == budget
