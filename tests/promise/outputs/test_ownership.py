"""What an enabled model owns: it is freed with its last reference, and a user's own `generate` stays."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from tests.helpers.heads import random_head
from tests.helpers.support import IDS, MASK, METHODS, PADDED, PROMPT, method_of, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def fresh() -> Any:
    return build(FAMILIES["llama"])


def everything(model: Any) -> None:
    """One call of every kind that the model's tier allows."""
    draft, is_tree = noisy_copy(model), hf_specdec.capability(model).tier == "tree"
    for name in [name for name in METHODS if is_tree or name != "lookahead"]:
        model.generate(PROMPT, **CALL, **method_of(name, draft))
        model.generate(PADDED, attention_mask=MASK, **CALL, **method_of(name, draft), return_dict_in_generate=True)
        list(hf_specdec.generate_many(model, PROMPT, **CALL, **method_of(name, draft)))
    model.generate(PROMPT, **CALL, spec_method="prompt_lookup", cache_implementation="static")
    model.generate(PROMPT, **CALL, spec_method="prompt_lookup", spec_config={"engine": "assisted"})
    model.set_attn_implementation("eager")
    model.generate(PROMPT, **CALL, spec_method="prompt_lookup")


@pytest.mark.at_most(1)
@pytest.mark.parametrize("use", [lambda model: None, everything], ids=["enabled", "used"])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_model_is_freed_with_its_last_reference(
    family: str, use: Callable[[Any], None], without_collector: None
) -> None:
    """Not when the cyclic collector happens to run: its weights may fill a GPU."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    use(model)
    gone = weakref.ref(model)
    weight = weakref.ref(model.get_output_embeddings().weight)
    del model
    assert gone() is None
    assert weight() is None


NETWORKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "draft model": lambda model: method_of("draft_model", noisy_copy(model)),
    "auto with a draft model": lambda model: {"spec_method": "auto", "assistant_model": noisy_copy(model)},
    "head": lambda model: {"spec_method": "eagle3", "assistant_model": random_head(model)},
}


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_call_allocates_is_freed_with_it(fresh: Any, name: str, without_collector: None) -> None:
    """Not when the cyclic collector happens to run: the caches of a few calls may fill a GPU."""
    model = hf_specdec.enable(fresh)
    how = NETWORKS[name](model)

    def calls() -> None:
        model.generate(PROMPT, **CALL, **how)
        model.generate(PADDED, attention_mask=MASK, **CALL, **how)
        list(hf_specdec.generate_many(model, IDS, max_batch_size=2, **CALL, **how))

    calls()
    gc.collect()
    before = {id(item) for item in gc.get_objects() if isinstance(item, torch.Tensor)}
    calls()
    assert [item.shape for item in gc.get_objects() if isinstance(item, torch.Tensor) and id(item) not in before] == []


def test_a_generate_on_the_instance_is_refused_and_may_be_set_afterwards(fresh: Any) -> None:
    """Python calls it in the place of a class's, so that `spec_method` would do nothing."""
    fresh.generate = functools.partial(fresh.generate, max_new_tokens=3)
    with pytest.raises(hf_specdec.UnsupportedModelError, match="del model.generate"):
        hf_specdec.enable(fresh)
    del fresh.generate
    fresh.generate = functools.partial(hf_specdec.enable(fresh).generate, max_new_tokens=3)
    assert fresh.generate(PROMPT, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 3


def test_a_shallow_copy_has_settings_of_its_own(fresh: Any) -> None:
    twin = copy.copy(hf_specdec.enable(fresh))
    twin.generation_config = tf.GenerationConfig(max_new_tokens=4, do_sample=False)
    assert twin.generate(PROMPT, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 4
    assert fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 8
    hf_specdec.disable(twin)
    assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup"), plain(fresh, PROMPT, **CALL))
