"""Models whose own code prepares other inputs from some length on: positions that jump, masks that hide a window."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec.compat.generation import has_foreign_inputs
from tests.helpers.support import CHAIN_DRAFTS, DRAFTS, plain
from tests.helpers.support import PROMPT as TEXT
from tests.helpers.zoo import FAMILIES, build

PROMPT = TEXT.index_fill(1, torch.tensor([0]), 0)
LIMIT = PROMPT.shape[1] + 8
CALL: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}
MASK = (PROMPT > 0).long()  # a column of padding, so that generate keeps it


def shifted(inputs: dict[str, Any]) -> dict[str, Any]:
    if (positions := inputs.get("position_ids")) is None:
        return inputs
    return {**inputs, "position_ids": positions + 50 * (positions >= LIMIT).long()}


class Positions(LlamaForCausalLM):
    """Positions jump."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return shifted(super().prepare_inputs_for_generation(input_ids, **kwargs))


class Window(LlamaForCausalLM):
    """Hides what is between the first four tokens and the last twenty."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if (mask := inputs.get("attention_mask")) is not None and mask.shape[1] >= LIMIT:
            inputs["attention_mask"] = mask.clone()
            inputs["attention_mask"][:, 4:-20] = 0
        return inputs


class Updates(LlamaForCausalLM):
    """Positions jump once, and go on from there."""

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if (positions := updated.get("position_ids")) is None:
            return updated
        updated["position_ids"] = torch.cat(
            [positions[:, :-1], positions[:, -1:] + 50 * (positions[:, -1:] == LIMIT)], 1
        )
        return updated


def on_the_model(model: Any) -> Any:
    """A function of the model's own."""
    prepare = model.prepare_inputs_for_generation

    def shifting(self: Any, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return shifted(prepare(input_ids, attention_mask=attention_mask, **kwargs))

    model.prepare_inputs_for_generation = types.MethodType(shifting, model)
    return model


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "positions": lambda model: become(model, Positions),
    "a mask": lambda model: become(model, Window),
    "an update": lambda model: become(model, Updates),
    "a function of the model": on_the_model,
}


def become(model: Any, cls: type) -> Any:
    model.__class__ = cls
    return model


def made(variant: str) -> tuple[Any, list[int]]:
    """The enabled model and its plain text, which differs from that of a model without code of its own."""
    usual = plain(build(FAMILIES["llama"]), PROMPT, attention_mask=MASK, **CALL)
    model = hf_specdec.enable(VARIANTS[variant](build(FAMILIES["llama"])))
    expected = plain(model, PROMPT, attention_mask=MASK, **CALL)
    assert not torch.equal(usual, expected)
    return model, expected[0].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_decoded_plainly_with_the_reason(variant: str) -> None:
    model, expected = made(variant)
    for method in ("plain", "auto"):
        output = model.generate(PROMPT, attention_mask=MASK, spec_method=method, return_dict_in_generate=True, **CALL)
        assert output.sequences[0].tolist() == expected
        assert "code of its own prepares its inputs" in output.spec_stats.plain_reason


def test_a_class_that_is_patched_later_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    assert not has_foreign_inputs(model), "no cost for models without such code"
    model.generate(PROMPT, spec_method="auto", **CALL)
    prepare = LlamaForCausalLM.prepare_inputs_for_generation
    monkeypatch.setattr(
        LlamaForCausalLM, "prepare_inputs_for_generation", lambda self, *ids, **kw: shifted(prepare(self, *ids, **kw))
    )
    expected = plain(model, PROMPT, **CALL)
    for method in CHAIN_DRAFTS:
        assert torch.equal(model.generate(PROMPT, **DRAFTS[method](expected[0].tolist()), **CALL), expected)
