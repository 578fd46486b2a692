"""A memory of the user's own: which one a model uses, shared, saved, and never a change of the text."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from hf_specdec import ConfigError, SpecMemory
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.promise.outputs.test_threads import frequent_switches

AUTO: dict[str, Any] = {"spec_method": "auto", "spec_config": {"num_nodes": 9}}
__all__ = ["frequent_switches"]


@pytest.fixture
def model() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


def generate(model: Any, **method: Any) -> Any:
    return model.generate(
        PROMPT, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **{**AUTO, **method}
    )


def test_the_memory_that_enable_was_given_is_used_with_its_own_bounds(model: Any) -> None:
    memory = SpecMemory(5_000, 700)
    hf_specdec.enable(model, spec_memory=memory, auto_config={"num_nodes": 9})
    generate(model)
    assert hf_specdec.spec_memory(model) is memory
    assert memory.bounds == (5_000, 700)
    assert len(memory.pool) > PROMPT.shape[1]
    assert len(memory.recycled) > 0


def test_without_one_the_model_s_own_is_returned_and_used(model: Any) -> None:
    first = hf_specdec.spec_memory(model)
    generate(model)
    assert hf_specdec.spec_memory(model) is first
    assert len(first.pool) > 0


def test_enabling_again_keeps_it_and_disabling_drops_it(model: Any) -> None:
    memory = SpecMemory()
    hf_specdec.enable(hf_specdec.enable(model, spec_memory=memory))
    assert hf_specdec.spec_memory(model) is memory
    hf_specdec.enable(hf_specdec.disable(model))
    assert hf_specdec.spec_memory(model) is not memory


def test_what_is_no_memory_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="spec_memory"):
        hf_specdec.enable(model, spec_memory="memory.safetensors")


def test_a_request_of_its_own_pool_leaves_the_memory_alone(model: Any) -> None:
    """`pool="request"` keeps nothing on the model."""
    memory = SpecMemory()
    hf_specdec.enable(model, spec_memory=memory)
    generate(model, spec_config={"num_nodes": 9, "pool": "request"})
    assert len(memory.pool) == len(memory.recycled) == sum(memory.greedy.seen) == 0
    other = hf_specdec.enable(build(FAMILIES["llama"]))
    generate(other, spec_config={"num_nodes": 9, "pool": "request"})
    assert not pickle.loads(pickle.dumps(other)).__dict__["_hf_specdec"].method_state.by_name


def test_a_saved_memory_makes_another_model_s_first_call_draft_as_well(model: Any, tmp_path: Path) -> None:
    """The text of an earlier call is drafted at once, and is plain generate's."""
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False).tolist()
    first = generate(model).spec_stats
    hf_specdec.spec_memory(model).save(tmp_path / "memory")
    other = hf_specdec.enable(build(FAMILIES["llama"]), spec_memory=SpecMemory.load(tmp_path / "memory"))
    output = generate(other)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.num_accepted_tokens > first.num_accepted_tokens


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_has_a_memory_of_its_own_that_knows_the_same(model: Any, duplicate: Callable[..., Any]) -> None:
    hf_specdec.enable(model, spec_memory=SpecMemory(5_000, 700))
    generate(model)
    memory, other = hf_specdec.spec_memory(model), duplicate(model)
    theirs = hf_specdec.spec_memory(other)
    assert theirs is not memory
    assert theirs.pool.generations() == memory.pool.generations()
    ours = memory.recycled.export()
    assert all((rows == ours[name]).all() for name, rows in theirs.recycled.export().items())
    before = len(memory.pool)
    assert generate(other).sequences.tolist() == plain(model, PROMPT, max_new_tokens=16, do_sample=False).tolist()
    assert len(memory.pool) == before < len(theirs.pool)
