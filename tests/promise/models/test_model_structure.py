"""What follows from a model's structure is found once, and anew after every change of the structure: layers, modules,
configuration.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.compat.fingerprint import fingerprint
from tests.helpers.heads import random_head
from tests.helpers.support import DRAFTS, PROMPT, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prompt_lookup": lambda model: {"spec_method": "prompt_lookup"},
    "lookahead": lambda model: {"spec_method": "lookahead"},
    "auto": lambda model: {"spec_method": "auto"},
    "draft model": lambda model: {"spec_method": "draft_model", "assistant_model": noisy_copy(model)},
    "head": lambda model: {"spec_method": "eagle3", "assistant_model": random_head(model)},
}


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a class's name with each model that torch's own iteration has passed from its first module to its last.

    Not with `model.dtype` and `model.device`, which look at the first weight.
    """
    walked: list[str] = []
    iterate = torch.nn.Module.named_modules

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from iterate(self, *args, **kwargs)
        if isinstance(self, PreTrainedModel):
            walked.append(type(self).__name__)

    monkeypatch.setattr(torch.nn.Module, "named_modules", named_modules)
    return walked


@pytest.mark.at_most(2)
@pytest.mark.parametrize("length", [1, 40], ids=["short", "long"])
@pytest.mark.parametrize("name", METHODS)
def test_a_call_looks_for_nothing_in_the_models_parts_again(name: str, length: int, walked: list[str]) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    how = METHODS[name](model)
    call = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    model.generate(PROMPT, **call, **how)
    assert walked
    model.generate(PROMPT, **call, **how)
    walked.clear()
    model.generate(PROMPT, **call, **how)
    assert walked == []


def cut(model: Any) -> None:
    """The last layer is taken away."""
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def grow_rotary(model: Any) -> None:
    """Frequencies follow the length of the text from the first new token on."""
    module = model.model.rotary_emb
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 64.0, "rope_theta": 10_000.0}
    model.config.max_position_embeddings = 31
    model.model.rotary_emb = type(module)(model.config)


def cast(model: Any) -> None:
    model.double()


def add_adapter(model: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=64)
        peft.inject_adapter_in_model(config, model)
        model.eval()


def other_head(model: Any) -> None:
    head = copy.deepcopy(model.lm_head)
    with torch.no_grad():
        head.weight.copy_(head.weight.flip(0))
    model.set_output_embeddings(head)


CHANGES = [cut, grow_rotary, cast, add_adapter, other_head]


@pytest.mark.at_most(2)
@pytest.mark.each_value
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["prompt_lookup", "draft model"])
def test_the_text_is_plains_after_a_change_of_the_structure(name: str, change: Callable[[Any], None]) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    how = METHODS[name](model)
    before = plain(model, PROMPT, **CALL).tolist()
    assert model.generate(PROMPT, **CALL, **how).tolist() == before
    change(model)
    expected = plain(model, PROMPT, **CALL).tolist()
    assert expected != before or change is cast, "the change makes a difference"
    for _ in range(2):
        assert model.generate(PROMPT, **CALL, **how).tolist() == expected
    output = model.generate(PROMPT, **CALL, **DRAFTS["oracle"](expected[0]), return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert (output.spec_stats.num_accepted_tokens > 0) == (change is not grow_rotary), "which decodes plainly"


def test_a_longer_table_of_positions_is_made_use_of() -> None:
    model = hf_specdec.enable(build(FAMILIES["gpt2"]))
    limit = PROMPT.shape[1] + 4
    model.config.n_positions = limit
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight.detach()[:limit].clone())
    short = plain(model, PROMPT, max_new_tokens=4, do_sample=False).tolist()
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False, **DRAFTS["oracle"](short[0])).tolist() == short
    model.config.n_positions = 64
    model.transformer.wpe = torch.nn.Embedding(64, model.config.n_embd)
    expected = plain(model, PROMPT, **CALL).tolist()
    output = model.generate(PROMPT, **CALL, **DRAFTS["oracle"](expected[0]), return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.num_accepted_tokens > 6


def test_a_module_made_in_the_place_of_another_is_another() -> None:
    """Also where it has the address of the one before."""
    model = build(FAMILIES["llama"])
    for _ in range(50):
        before, address = fingerprint(model), id(model.lm_head)
        del model.lm_head
        model.lm_head = torch.nn.Linear(48, 128, bias=False)
        assert fingerprint(model) != before
        if id(model.lm_head) == address:
            return
    pytest.fail("no module was made at the address of the one before")


def test_a_class_that_does_not_name_its_embeddings_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some of transformers' own; draft heads, which read them, are refused."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    expected, head = plain(model, PROMPT, **CALL), random_head(model)

    def unknown(self: Any) -> Any:
        raise NotImplementedError("`get_input_embeddings` is not there")

    monkeypatch.setattr(type(model), "get_input_embeddings", unknown)
    assert model.generate(PROMPT, **CALL, spec_method="prompt_lookup").tolist() == expected.tolist()
    with pytest.raises(hf_specdec.UnsupportedModelError, match="does not name them"):
        model.generate(PROMPT, **CALL, spec_method="eagle3", assistant_model=head)


def test_a_configuration_with_empty_layer_types_verifies_trees() -> None:
    """As tools write it that cut layers off; transformers' mask functions ask whether the name is there."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    expected = plain(model, PROMPT, **CALL)
    model.config.layer_types = None
    output = model.generate(PROMPT, **CALL, spec_method="lookahead", return_dict_in_generate=True)
    assert output.sequences.equal(expected)
    assert output.spec_stats.tier == hf_specdec.capability(model).tier == "tree"
