"""What an enabled model owns: it is freed with its last reference, and a user's own `generate` stays."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
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


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests have left is neither looked at nor collected
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def everything(model: Any) -> None:
    """One call of every kind."""
    draft = noisy_copy(model)
    for name in METHODS:
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


def test_a_generate_of_ones_own_is_called_and_comes_back(fresh: Any) -> None:
    ours = fresh.generate = functools.partial(fresh.generate, max_new_tokens=5, do_sample=False)
    expected = ours(PROMPT).tolist()
    hf_specdec.enable(hf_specdec.enable(fresh))
    assert fresh.generate(PROMPT).tolist() == expected
    output = fresh.generate(PROMPT, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.method == "prompt_lookup"
    assert [r.token_ids for r in hf_specdec.generate_many(fresh, PROMPT)] == [expected[0][PROMPT.shape[1] :]]
    assert hf_specdec.disable(fresh).generate is ours


def test_what_ones_own_generate_sets_is_checked(fresh: Any) -> None:
    fresh.generate = functools.partial(fresh.generate, num_beams=2)
    with pytest.raises(hf_specdec.ConfigError, match="num_beams"):
        hf_specdec.enable(fresh).generate(PROMPT, **CALL, spec_method="prompt_lookup")


def test_a_function_of_ones_own_sees_every_call(fresh: Any) -> None:
    seen, inner = [], fresh.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("max_new_tokens"))
        return inner(*args, **kwargs)

    fresh.generate = generate
    expected = plain(fresh, PROMPT, **CALL).tolist()
    hf_specdec.enable(fresh)
    assert fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup").tolist() == expected
    assert seen == [8]
    assert hf_specdec.disable(fresh).generate is generate


def test_a_function_that_calls_the_enabled_method_may_be_enabled_again(fresh: Any) -> None:
    """As a tracer's that wraps `generate`, while the user switches speculation off and on."""
    expected = plain(fresh, PROMPT, **CALL).tolist()
    enabled, seen = hf_specdec.enable(fresh).generate, []

    def traced(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs))
        return enabled(*args, **kwargs)

    fresh.generate = traced
    assert hf_specdec.enable(hf_specdec.disable(fresh)).generate(PROMPT, **CALL).tolist() == expected
    assert fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup").tolist() == expected
    assert len(seen) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_bound_to_itself_with_ones_own_generate(fresh: Any, duplicate: Callable[[Any], Any]) -> None:
    fresh.generate = functools.partial(fresh.generate, max_new_tokens=3)
    twin = duplicate(hf_specdec.enable(fresh))
    assert twin.generate.__self__ is twin
    assert twin.generate(PROMPT, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 3
    assert hf_specdec.disable(twin).generate(PROMPT).shape[1] == PROMPT.shape[1] + 3
    assert twin.generate.func.__self__ is twin
    assert fresh.generate.__self__ is fresh


def test_a_shallow_copy_has_settings_of_its_own(fresh: Any) -> None:
    twin = copy.copy(hf_specdec.enable(fresh))
    twin.generation_config = tf.GenerationConfig(max_new_tokens=4, do_sample=False)
    assert twin.generate(PROMPT, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 4
    assert fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup").shape[1] == PROMPT.shape[1] + 8
    hf_specdec.disable(twin)
    assert torch.equal(fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup"), plain(fresh, PROMPT, **CALL))
