"""Configurations of the methods that draft with a head: what they take of a draft model's, and what they refuse."""

import pytest

from hf_specdec import ConfigError
from hf_specdec.methods.registry import METHODS

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
