"""A configuration is checked when it is made, and says what is wrong with it."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.plain.method import PlainConfig
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.registry import METHODS

WHOLE_NUMBERS = ("max_draft_len", "max_matching_ngram_size")
COUNTS: list[tuple[Any, str]] = [
    *((PromptLookupConfig, field) for field in WHOLE_NUMBERS),
    *((DraftModelConfig, field) for field in ("draft_len", "num_branches", "max_nodes")),
]


@pytest.mark.parametrize(("config_class", "field"), COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4]])
def test_counts_are_whole_numbers_of_at_least_one(config_class: Any, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config_class(**{field: value})
    message = str(error.value)
    assert f"`{field}`" in message
    assert "at least 1" in message
    assert repr(value) in message
    assert (error.value.field, error.value.value) == (field, value)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("field", "value", "nearest"), [("pool", "sharde", "shared"), ("engine", "assist", "assisted")]
)
def test_a_misspelt_choice_is_answered_with_the_nearest_one(field: str, value: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` must be one of .*Did you mean '{nearest}'"):
        PromptLookupConfig(**{field: value})


@pytest.mark.parametrize("value", [[], "cpu", 0, [-1], [1.5], [True], [""], [None], {0: 1}])
def test_devices_are_a_list_of_indices_or_names(value: Any) -> None:
    for config_class in (PromptLookupConfig, DraftModelConfig):
        for field in config_class.device_fields.values():
            with pytest.raises(ConfigError, match=f"`{field}` must be a non-empty list"):
                config_class(**{field: value})


EXPECTED = PromptLookupConfig(max_draft_len=7, max_matching_ngram_size=3, device_list=[0])


@pytest.mark.parametrize(
    "value",
    [
        EXPECTED,
        {"max_draft_len": 7, "max_matching_ngram_size": 3, "device_list": [0]},
        {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3, "device_list": [0]},
        {"num_draft_tokens": 7, "prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3, "device_list": [0]},
        [7, 3, [0]],
        "[7, 3, [0]]",
        "[7,3,[0]]",
        "{'max_draft_len': 7, 'max_matching_ngram_size': 3, 'device_list': [0]}",
    ],
)
def test_all_ways_to_write_a_configuration_mean_the_same(value: Any) -> None:
    assert PromptLookupConfig.parse(value) == EXPECTED


def test_the_list_form_may_be_cut_short() -> None:
    assert PromptLookupConfig.parse(None) == PromptLookupConfig.parse({}) == PromptLookupConfig()
    assert PromptLookupConfig.parse([4]) == PromptLookupConfig(max_draft_len=4)
    assert PromptLookupConfig.parse([4, 3]) == PromptLookupConfig(max_draft_len=4, max_matching_ngram_size=3)


@pytest.mark.parametrize("value", [[], [1, 2, [0], 4], "[]"])
def test_a_list_form_of_the_wrong_length_shows_the_form(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_draft_len, max_matching_ngram_size, device_list"):
        PromptLookupConfig.parse(value, "prompt_lookup_config")


@pytest.mark.parametrize("value", ["", "10", "fast", "[10", "__import__('os')", 10, 1.5, object(), PlainConfig()])
def test_what_is_no_configuration_is_refused_by_the_name_of_its_argument(value: Any) -> None:
    with pytest.raises(ConfigError, match="`prompt_lookup_config` must be"):
        PromptLookupConfig.parse(value, "prompt_lookup_config")


def test_an_unknown_key_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_draft_len'.*fields of PromptLookupConfig") as error:
        PromptLookupConfig.parse({"max_draft_length": 4})
    assert "max_draft_length" in str(error.value)


def test_two_names_of_one_field_must_agree() -> None:
    with pytest.raises(ConfigError, match="the same setting"):
        PromptLookupConfig.parse({"max_draft_len": 4, "prompt_lookup_num_tokens": 5})


def test_a_method_without_a_list_form_says_so() -> None:
    with pytest.raises(ConfigError, match="no list form"):
        PlainConfig.parse([1])


def test_a_configuration_does_not_change() -> None:
    config = PromptLookupConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_draft_len = 3  # type: ignore[misc]
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_an_error_survives_pickling() -> None:
    """Worker processes send their errors home."""
    with pytest.raises(ConfigError) as error:
        PromptLookupConfig(max_draft_len=0)
    twin = pickle.loads(pickle.dumps(error.value))
    assert str(twin) == str(error.value)
    assert twin.remedy == error.value.remedy


HEADS = ("eagle3", "mtp", "dflash")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_takes_the_fields_of_a_draft_model_by_their_aliases(name: str) -> None:
    config = METHODS[name].config_class.parse({"max_draft_len": 3, "num_branches": 2, "max_nodes": 5})
    assert config.draft_len == 3  # type: ignore[attr-defined]
    assert config.node_budget == 5


@pytest.mark.parametrize("name", HEADS)
def test_a_tree_of_a_head_has_sixteen_nodes_unless_it_says_more(name: str) -> None:
    parse = METHODS[name].config_class.parse
    assert parse({"draft_len": 3, "num_branches": 1}).node_budget == 3
    assert parse({"draft_len": 3, "num_branches": 3}).node_budget == 9
    assert parse({"draft_len": 10, "num_branches": 10}).node_budget == 16


@pytest.mark.parametrize("name", HEADS)
def test_what_only_a_draft_model_can_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        METHODS[name].config_class.parse({"engine": "assisted"})
    assert raised.value.field == "engine"
