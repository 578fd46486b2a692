"""`generate_many` of prompts with methods and draft models of their own."""

import functools
import itertools
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, noisy_copy, plain, results_of
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11, 12], [7, 8, 9, 7, 8, 9]]
DRAFTS = ["draft", "other_draft", "head", "none"]


def methods_of(model: Any) -> dict[str, dict[str, Any]]:
    """Arguments of a prompt by what drafts for it."""
    always = {"confidence_threshold": 0.0}
    return {
        "draft": {"spec_method": "draft_model", "assistant_model": noisy_copy(model), "spec_config": always},
        "other_draft": {
            "spec_method": "draft_model",
            "assistant_model": noisy_copy(model, seed=5),
            "spec_config": always,
        },
        "head": {"spec_method": "eagle3", "assistant_model": random_head(model), "spec_config": always},
        "none": {"spec_method": "prompt_lookup"},
    }


def check(model: Any, prompts: list[dict[str, Any]], **options: Any) -> dict[int, Any]:
    """The results, which are those of plain `generate`."""
    results = {result.index: result for result in hf_specdec.generate_many(model, prompts, **OPTIONS | options)}
    for index, prompt in enumerate(prompts):
        ids = prompt["input_ids"]
        assert results[index].error is None
        assert results[index].token_ids == plain_text(model, tuple(ids[0].tolist()))
    return results


@functools.cache
def plain_text(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """The new tokens, computed once for all tests of a model."""
    ids: list[int] = plain(model, torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
    return ids


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DRAFTS, 2)))
def test_prompts_with_different_draft_models_take_turns(target: Any, first: str, second: str) -> None:
    methods = methods_of(target)
    chosen = [methods[name] for name in (first, second, first)]
    check(target, [{"input_ids": torch.tensor([p]), **m} for p, m in zip(PROMPTS, chosen, strict=True)])


def test_the_first_prompts_of_a_model_may_have_drafts_that_read_it() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    ours = methods_of(model)["head"]
    check(model, [{"input_ids": torch.tensor([prompt]), **ours} for prompt in PROMPTS], spec_method="plain")


@pytest.mark.parametrize("ours", ["prompt_lookup", "lookahead", "plain"])
def test_a_prompt_s_own_method_leaves_the_job_s_configuration_and_draft_aside(target: Any, ours: str) -> None:
    job = {"spec_method": "draft_model", "assistant_model": noisy_copy(target), "spec_config": {"num_branches": 2}}
    prompts: list[dict[str, Any]] = [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    prompts[1]["spec_method"] = ours
    results = check(target, prompts, **job)
    assert [results[index].stats.method for index in range(3)] == ["draft_model", ours, "draft_model"]


def test_a_prompt_s_own_configuration_names_its_method(target: Any) -> None:
    prompts = [{"input_ids": torch.tensor([PROMPTS[0]]), "lookahead_config": [3, 3, 3]}]
    assert check(target, prompts)[0].stats.method == "lookahead"


@pytest.mark.parametrize("batch", [1, 2])
def test_a_prompt_s_own_observer_sees_its_steps(target: Any, batch: int) -> None:
    """In the place of the job's, which sees those of the others."""
    ours: list[Any] = []
    others: list[Any] = []
    prompts = [{"input_ids": PROMPT[0].tolist(), "spec_observer": ours.append}, PROMPT[0, 5:].tolist()]
    results = results_of(target, prompts, max_batch_size=batch, spec_observer=others.append, **OPTIONS)
    assert all(result.error is None for result in results)
    assert {step.row for step in ours} == {0}
    assert {step.row for step in others} == {1}


def test_an_observer_of_one_prompt_that_fails_ends_that_prompt_alone(target: Any) -> None:
    def fail(step: Any) -> None:
        raise KeyError("seen enough")

    prompts = [{"input_ids": PROMPT[0].tolist(), "spec_observer": fail}, *PROMPTS]
    results = sorted(results_of(target, prompts, **OPTIONS), key=lambda result: result.index)
    assert isinstance(results[0].error, KeyError)
    for result in results[1:]:
        assert result.error is None
        assert result.token_ids == plain_text(target, tuple(result.prompt))


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    ("family", "ours", "error"),
    [
        ("llama", {"spec_method": "mtp"}, hf_specdec.UnsupportedModelError),
        ("minimax", {"spec_method": "lookahead"}, hf_specdec.UnsupportedModelError),
        ("minimax", {"lookahead_config": [3, 3, 3]}, hf_specdec.UnsupportedModelError),
        ("qwen3_next", {"spec_method": "mtp"}, hf_specdec.CheckpointError),
    ],
)
def test_a_method_that_the_model_cannot_use_is_the_prompt_s_error(
    family: str, ours: dict[str, Any], error: type[Exception]
) -> None:
    """A method of the whole job is the job's error."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    prompts: list[dict[str, Any]] = [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    prompts[1] |= ours
    results = {result.index: result for result in hf_specdec.generate_many(model, prompts, **OPTIONS)}
    assert isinstance(results[1].error, error)
    for index in (0, 2):
        assert results[index].token_ids == plain_text(model, tuple(PROMPTS[index]))
    with pytest.raises(error):
        list(hf_specdec.generate_many(model, PROMPTS, **OPTIONS, **ours))


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ({}, "auto"),
        ({"prompt_lookup_config": {"max_matching_ngram_size": 2}}, "prompt_lookup"),
        ({"lookahead_config": [4, 3, 5]}, "lookahead"),
        ({"prompt_lookup_config": None}, "auto"),
    ],
)
def test_an_argument_of_a_method_names_the_method(target: Any, how: dict[str, Any], method: str) -> None:
    """As for `generate`, which drafts nothing where nothing names a method."""
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    (result,) = hf_specdec.generate_many(target, PROMPT, **call, **how)
    assert result.error is None
    assert result.stats.method == method
    expected = target.generate(PROMPT, **call, return_dict_in_generate=True, **how)
    assert result.token_ids == expected.sequences[0, PROMPT.shape[1] :].tolist()
    assert method == "auto" or expected.spec_stats.method == method
