"""Draft models compile with a target over a static cache, by plain generate's rule for the draft: the same tokens."""

import copy
import dataclasses
import logging
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.engine.model_state import state_of
from tests.helpers.cover import wide_but
from tests.helpers.graphs import counting, on_cpu
from tests.helpers.support import PROMPT, noisy_copy, plain, speculative
from tests.helpers.zoo import FAMILIES, build

STATIC: dict[str, Any] = {"cache_implementation": "static", "do_sample": False}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_len": 3, "confidence_threshold": 0.0},
    "tree": {"draft_len": 3, "num_branches": 3, "max_nodes": 7, "confidence_threshold": 0.0},
}
ONE_LAYER = dataclasses.replace(FAMILIES["llama"], options={**FAMILIES["llama"].options, "num_hidden_layers": 1})


@pytest.fixture
def pair() -> tuple[Any, Any]:
    model = build(ONE_LAYER)
    draft = noisy_copy(model)
    return hf_specdec.enable(model), draft


def call(model: Any, draft: Any, ids: torch.Tensor, shape: str = "chain", **options: Any) -> Any:
    draft_options = {"spec_method": "draft_model", "assistant_model": draft, "spec_config": SHAPES[shape]}
    return speculative(model, ids, return_dict_in_generate=True, **draft_options, **STATIC | options)


@pytest.mark.wide
@pytest.mark.parametrize("batch", wide_but([2], [1, 2]))
@pytest.mark.parametrize("shape", wide_but(["tree"], SHAPES))
def test_few_graphs_serve_texts_of_any_length(pair: tuple[Any, Any], graphs: list[Any], shape: str, batch: int) -> None:
    """Two of either model at most; the buffers stay where they are, and later calls compile little."""
    model, draft = pair
    config, numbers, addresses = on_cpu(counting(graphs)), [], set()
    for length, new in ((20, 12), (9, 16), (12, 14)):
        ids = PROMPT[:, :length].repeat(batch, 1)
        expected = plain(model, ids, max_new_tokens=new, do_sample=False)
        output = call(model, draft, ids, shape, max_new_tokens=new, compile_config=config)
        assert output.sequences.tolist() == expected.tolist()
        stats = output.spec_stats
        assert stats.num_accepted_tokens > 0
        assert stats.num_graphs == len(graphs)
        numbers.append(len(graphs))
        (forward,) = state_of(draft).compiled.values()
        assert {width for _, width, _ in forward.shapes} <= {1, 2, 4, 8}
        addresses |= {forward._kept[0].layers[0].keys.data_ptr()}
    assert len(state_of(draft).compiled) < numbers[0] <= numbers[-1] <= 4
    assert len({columns for _, _, columns in forward.shapes}) == 1
    assert len(addresses) == 1


@pytest.mark.parametrize("options", [{"disable_compile": True}, {"cache_implementation": None}], ids=str)
def test_a_draft_is_not_compiled_where_plain_generate_would_not(
    pair: tuple[Any, Any], graphs: list[Any], options: dict[str, Any]
) -> None:
    output = call(*pair, PROMPT, max_new_tokens=8, compile_config=on_cpu(counting(graphs)), **options)
    assert graphs == []
    assert (output.spec_stats.num_graphs, output.spec_stats.compile_seconds) == (0, 0.0)
    assert state_of(pair[1]).compiled == {}


@pytest.mark.wide
def test_a_draft_with_states_runs_as_it_is_written_and_says_why_once(
    graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, draft = hf_specdec.enable(build(ONE_LAYER)), build(FAMILIES["lfm2"])
    config = on_cpu(counting(graphs))
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            output = call(model, draft, PROMPT, max_new_tokens=8, compile_config=config)
            assert output.sequences.equal(expected)
    said = [record.message for record in caplog.records if "Lfm2ForCausalLM is not compiled" in record.message]
    assert len(said) == 1
    assert "more than keys and values" in said[0]
    assert len(graphs) == output.spec_stats.num_graphs > 0, "the target is"


@pytest.mark.wide
def test_a_draft_that_cannot_be_compiled_says_why_once(
    pair: tuple[Any, Any], graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler fails on the second model that it sees."""
    model, draft = pair
    draft = copy.deepcopy(draft)

    def broken(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        raise NotImplementedError("no such card")

    expected = plain(model, PROMPT, max_new_tokens=12, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            output = call(model, draft, PROMPT, max_new_tokens=12, compile_config=on_cpu(broken))
            assert output.sequences.equal(expected)
    assert sum("is not compiled" in record.message for record in caplog.records) == 2, "of the target and of the draft"


@pytest.mark.wide
def test_calls_at_the_same_time_have_buffers_of_their_own(pair: tuple[Any, Any], graphs: list[Any]) -> None:
    """A call inside another one, here from its stopping criterion."""
    model, _ = pair
    options = {"max_new_tokens": 10, "compile_config": on_cpu(counting(graphs)), "spec_method": "prompt_lookup"}
    expected = plain(model, PROMPT, max_new_tokens=10, do_sample=False)
    result: list[Any] = []

    def within(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if len(result) < 2:
            result.append(None)
            result[-1] = speculative(model, PROMPT, **STATIC | options)
        return torch.zeros(len(ids), dtype=torch.bool)

    assert speculative(model, PROMPT, **STATIC | options).equal(expected)
    assert speculative(model, PROMPT, **STATIC | options, stopping_criteria=[within]).equal(expected)
    assert len(result) == 2
    assert all(inner.equal(expected) for inner in result)
