"""A head whose file repeats the target's embeddings or output head: held once, and never the way to change a target."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hf_specdec
from hf_specdec.methods.draft_head import DraftHead
from tests.helpers.dflash import random_dflash_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

MODULES = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}


@pytest.fixture
def target() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.fixture
def head(target: Any) -> DraftHead:
    head = random_dflash_head(target, kind="dflash")
    head.embed_tokens = copy.deepcopy(target.get_input_embeddings()).requires_grad_(False)
    head.lm_head = copy.deepcopy(target.get_output_embeddings()).requires_grad_(False)
    return head


def shared(head: DraftHead, target: Any) -> set[str]:
    """The modules whose weights are in the target's memory."""
    places = {name: getattr(target, getter)().weight.data_ptr() for name, getter in MODULES.items()}
    return {name for name in MODULES if getattr(head, name).weight.data_ptr() == places[name]}


def write(target: Any, head: DraftHead) -> torch.Tensor:
    how = {"max_new_tokens": 10, "do_sample": False, "spec_method": "dflash", "assistant_model": head}
    written: torch.Tensor = target.generate(PROMPT, **how)
    return written


def test_weights_that_are_equal_are_held_once(target: Any, head: DraftHead) -> None:
    expected = plain(target, PROMPT, max_new_tokens=10, do_sample=False)
    assert shared(head, target) == set()
    for _ in range(2):
        assert torch.equal(write(target, head), expected)
        assert shared(head, target) == set(MODULES)
    assert shared(copy.deepcopy(head), target) == set()


@pytest.mark.parametrize("name", MODULES)
def test_others_stay_the_heads_own(target: Any, head: DraftHead, name: str) -> None:
    with torch.no_grad():
        getattr(head, name).weight[3, 4] += 0.5
    mine = getattr(head, name).weight.clone()
    write(target, head)
    assert shared(head, target) == set(MODULES) - {name}
    assert torch.equal(getattr(head, name).weight, mine)


def test_of_another_type_or_trained_ones_too(target: Any, head: DraftHead) -> None:
    head.lm_head.weight.requires_grad_(True)
    write(target, head)
    assert shared(head, target) == {"embed_tokens"}
    head.double()
    write(target, head)
    assert shared(head, target) == set()


def load(head: DraftHead) -> None:
    head.load_state_dict({name: torch.ones_like(weight) for name, weight in head.state_dict().items()})


def train(head: DraftHead) -> None:
    head.requires_grad_(True)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 1.0


@pytest.mark.parametrize("change", [load, train])
def test_a_head_that_changes_leaves_its_target_alone(target: Any, head: DraftHead, change: Any) -> None:
    write(target, head)
    kept = {name: weight.clone() for name, weight in target.state_dict().items()}
    change(head)
    assert shared(head, target) == set()
    assert all(torch.equal(weight, kept[name]) for name, weight in target.state_dict().items())
    assert not torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)


def test_a_second_target_reads_the_first_ones_no_more(target: Any, head: DraftHead) -> None:
    """Two targets in turn: each text is plain's, and neither target is changed."""
    other = hf_specdec.enable(build(dataclasses.replace(FAMILIES["llama"], seed=9)))
    for model in (target, other, target):
        assert torch.equal(write(model, head), plain(model, PROMPT, max_new_tokens=10, do_sample=False))
    assert shared(head, other) == set()


def test_a_head_from_another_target_of_the_same_weights(target: Any, head: DraftHead) -> None:
    """It leaves the first target's memory for the second's, so that the first can be freed."""
    twin = copy.deepcopy(target)
    for model in (target, twin) * 2:
        write(model, head)
        assert shared(head, model) == set(MODULES)


def test_saved_heads_hold_all_their_weights(target: Any, head: DraftHead) -> None:
    write(target, head)
    state = head.state_dict()
    assert {f"{name}.weight" for name in MODULES} <= set(state)
    assert isinstance(head.embed_tokens, nn.Embedding)
