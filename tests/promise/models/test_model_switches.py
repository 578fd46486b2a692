"""What a model computes by is looked at before each call: switches of the caller's code, train mode, and functions that
somebody has put in the place of transformers' own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import hf_specdec
from hf_specdec.compat.attention import mask_function_of
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.promise.models.test_model_changes import CALL, steered, tier

pytestmark = pytest.mark.probes_anew


@pytest.fixture
def fresh() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


class Switched:
    """A hook and a forward that act once they are switched on."""

    is_on = False

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.is_on = inner, False

    def hook(self, module: Any, args: Any, output: Any) -> Any:
        return steered(output) if self.is_on else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return steered(output) if self.is_on else output


class SwitchedModule(torch.nn.Module):
    """A module that acts once it is switched on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.strength = inner, 0.0
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return steered(output) if self.strength else output


def hook_of_an_object(model: Any) -> Callable[[], None]:
    switched = Switched()
    model.model.layers[1].register_forward_hook(switched.hook)
    return lambda: setattr(switched, "is_on", True)


def forward_of_an_object(model: Any) -> Callable[[], None]:
    switched = Switched(model.model.layers[1].mlp.forward)
    model.model.layers[1].mlp.forward = switched.forward
    return lambda: setattr(switched, "is_on", True)


def own_module(model: Any) -> Callable[[], None]:
    model.model.layers[1].mlp = SwitchedModule(model.model.layers[1].mlp)
    return lambda: setattr(model.model.layers[1].mlp, "strength", 0.5)


SWITCHES = [hook_of_an_object, forward_of_an_object, own_module]


@pytest.mark.parametrize("prepare", SWITCHES)
def test_code_of_the_callers_that_is_switched_on_is_noticed(fresh: Any, prepare: Any) -> None:
    switch_on = prepare(fresh)
    before = plain(fresh, PROMPT, **CALL).tolist()
    assert tier(fresh) == "tree"
    switch_on()
    after = plain(fresh, PROMPT, **CALL)
    assert after.tolist() != before
    for name in ("prompt_lookup", "auto"):
        assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method=name), after)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_of_train_mode_that_begins_later_is_noticed(family: str) -> None:
    model = hf_specdec.enable(build(FAMILIES[family])).train()
    for share, result in ((0, "tree"), (0.4, "plain")):
        for module in model.modules():
            for name in ("p", "attention_dropout"):
                if isinstance(getattr(module, name, None), int | float):
                    setattr(module, name, share)
        assert tier(model) == result


def test_preparation_replaced_on_the_class_is_noticed(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tier(fresh) == "tree"
    prepare = type(fresh).prepare_inputs_for_generation

    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * 2
        return inputs

    monkeypatch.setattr(type(fresh), "prepare_inputs_for_generation", prepare_inputs_for_generation)
    expected = plain(fresh, PROMPT, **CALL)
    for name in ("prompt_lookup", "auto", "plain"):
        assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method=name), expected)


def test_an_attention_function_registered_later_is_noticed(fresh: Any) -> None:
    """One that lets the last query see less, as no tree does."""
    assert tier(fresh) == "tree"
    registered = AttentionInterface()["sdpa"]

    def attend(*args: Any, **kwargs: Any) -> Any:
        output, weights = registered(*args, **kwargs)
        return steered(output), weights

    AttentionInterface.register("sdpa", attend)
    try:
        expected = plain(fresh, PROMPT, **CALL)
        for name in ("prompt_lookup", "auto", "plain"):
            assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method=name), expected)
        assert tier(fresh) == "plain"
    finally:
        AttentionInterface.register("sdpa", registered)
    assert tier(fresh) == "tree"


def test_a_mask_function_registered_later_is_noticed(fresh: Any) -> None:
    """One that hides the first column from forwards of several tokens is no tree's mask."""
    assert tier(fresh) == "tree"
    registered = mask_function_of("sdpa")

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = registered(*args, **{**kwargs, "allow_is_causal_skip": False})
        if made is not None and 1 < made.shape[-2] < 9:
            made = made.clone()
            made[..., 0] = False
        return made

    AttentionMaskInterface.register("sdpa", mask)
    try:
        expected = plain(fresh, PROMPT, **CALL)
        assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method="auto"), expected)
        assert tier(fresh) == "plain"
    finally:
        AttentionMaskInterface.register("sdpa", registered)
    assert tier(fresh) == "tree"
