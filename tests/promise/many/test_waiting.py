"""Prompts of `generate_many` that come while others are decoded, and prompts that bring a seed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_specdec import generate_many
from hf_specdec.api.many_prompts.job import NOT_YET
from tests.helpers.support import PROMPT, plain


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
