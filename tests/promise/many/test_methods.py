"""`generate_many` has one method, draft and observer for all its prompts, which may come while others are decoded."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import generate_many
from hf_specdec.api.many_prompts.job import NOT_YET
from tests.helpers.support import PROMPT, plain, results_of
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11, 12], [7, 8, 9, 7, 8, 9]]


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.mark.parametrize(
    "ours",
    [{"spec_method": "lookahead"}, {"lookahead_config": [3, 3, 3]}, {"assistant_model": 3}, {"spec_observer": 3}],
)
def test_a_prompt_with_a_method_of_its_own_is_refused(target: Any, ours: dict[str, Any]) -> None:
    prompts = [PROMPTS[0], {"input_ids": PROMPTS[1], **ours}]
    results = sorted(results_of(target, prompts, **OPTIONS), key=lambda result: result.index)
    assert results[0].error is None
    assert f"must not set {next(iter(ours))}, which is the same for all prompts" in str(results[1].error)


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
def test_a_method_that_the_model_cannot_use_is_the_job_s_error(
    family: str, ours: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        list(hf_specdec.generate_many(hf_specdec.enable(build(FAMILIES[family])), PROMPTS, **OPTIONS, **ours))


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


@pytest.mark.parametrize("family", ["llama", "minimax"])
def test_a_prompt_joins_while_another_is_decoded(zoo: Callable[[str], Any], family: str) -> None:
    """The second comes when the first has begun; models that share no batch end where nothing is waiting."""
    wanted = 0

    def prompts() -> Iterator[Any]:
        nonlocal wanted
        yield PROMPT
        yield NOT_YET
        wanted += 1
        yield PROMPT[:, :9]
        yield NOT_YET
        wanted += 1

    results = {result.index: result for result in generate_many(zoo(family), prompts(), max_new_tokens=8)}
    expected = plain(zoo(family), PROMPT, max_new_tokens=8)[0, PROMPT.shape[1] :].tolist()
    assert results[0].token_ids == expected
    assert sorted(len(result.token_ids) for result in results.values()) == ([8, 8] if family == "llama" else [8])
    assert wanted == (2 if family == "llama" else 0)


def test_a_job_ends_where_nothing_is_waiting(model: Any) -> None:
    assert list(generate_many(model, iter([NOT_YET, PROMPT]), max_new_tokens=4)) == []


def test_a_prompt_s_own_seed_counts(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    prompts = [{"input_ids": PROMPT, "seed": 5}, {"input_ids": PROMPT}, {"input_ids": PROMPT, "seed": 0}]
    results = sorted(generate_many(model, prompts, seed=40, **options), key=lambda result: result.index)
    assert [result.seed for result in results] == [5, 41, 0]
    for result in results:
        torch.manual_seed(result.seed or 0)
        assert result.token_ids == plain(model, PROMPT, **options)[0, PROMPT.shape[1] :].tolist()
