"""Lookahead as its users meet it: sizes reserved for a model and asked for by a call, and what an observer sees."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import ConfigError, LookaheadConfig, SpecStep
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return build(FAMILIES["llama"])


def widths(model: Any, **kwargs: Any) -> list[int]:
    """How many tokens each forward behind the prompt computes."""
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    hf_specdec.capability(model)
    seen.clear()
    try:
        model.generate(PROMPT, spec_method="lookahead", **OPTIONS, **kwargs)
    finally:
        handle.remove()
    return seen[1:]


def test_a_request_within_the_reserved_sizes_is_served(model: Any) -> None:
    hf_specdec.enable(model, lookahead_config=[7, 5, 7])
    expected = plain(model, PROMPT, **OPTIONS).tolist()
    for request in ([7, 5, 7], [3, 4, 2], [2, 2, 1], [1, 1, 0]):
        output = model.generate(PROMPT, spec_method="lookahead", lookahead_config=request, **OPTIONS)
        assert output.tolist() == expected


@pytest.mark.parametrize("request_", [[8, 5, 7], [7, 6, 7], [7, 5, 8]])
def test_a_request_beyond_them_is_an_error(model: Any, request_: list[int]) -> None:
    hf_specdec.enable(model, lookahead_config=[7, 5, 7])
    with pytest.raises(ConfigError, match="must be at most [57], as reserved for the model, but is [678]"):
        model.generate(PROMPT, spec_method="lookahead", lookahead_config=request_, **OPTIONS)


def test_a_request_without_sizes_takes_the_models(model: Any) -> None:
    """A step never computes more than TensorRT-LLM's `max_draft_len` besides the current token."""
    hf_specdec.enable(model, lookahead_config=[3, 3, 2])
    reserved = max(widths(model))
    assert 3 * 2 <= reserved <= 1 + LookaheadConfig.parse([3, 3, 2]).max_draft_len
    assert max(widths(model, lookahead_config=[2, 2, 1])) < reserved
    assert set(widths(model, lookahead_config=[1, 1, 0])) == {1}


def test_an_observer_sees_the_window(model: Any) -> None:
    """It goes with the tree, one more level a step until it is full; the text's last token is the root of both."""
    steps: list[SpecStep] = []
    hf_specdec.enable(model)
    model.generate(PROMPT, spec_method="lookahead", lookahead_config=[5, 4, 3], spec_observer=steps.append, **OPTIONS)
    widths = [0 if step.tree.extra is None else len(step.tree.extra.tokens) for step in steps[:4]]
    assert widths == [4, 9, 14, 14]
    for step, following in itertools.pairwise(steps):
        assert step.accepted[-1] == following.tree.tokens[0]
        assert following.tree.num_columns <= 1 + LookaheadConfig.parse([5, 4, 3]).max_draft_len


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_window_that_reaches_beyond_the_models_positions_stays_away(family: str) -> None:
    """Learned positions end; the text may use the last one, the window must not look behind it."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    prompt = torch.cat([PROMPT] * 16, dim=1)[:, :490]
    room = model.config.max_position_embeddings - prompt.shape[1]
    expected = plain(model, prompt, max_new_tokens=room, do_sample=False)
    output = model.generate(
        prompt, spec_method="lookahead", lookahead_config=[9, 5, 5], max_new_tokens=room, do_sample=False
    )
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["gpt_neo", "minimax"])
def test_a_model_of_the_chain_tier_is_refused_with_what_works_instead(zoo: Callable[[str], Any], family: str) -> None:
    model = zoo(family)
    if hf_specdec.capability(model).tier == "tree":
        return
    with pytest.raises(hf_specdec.UnsupportedModelError, match=r"takes chains only: .*'draft_model'.*'prompt_lookup'"):
        model.generate(PROMPT, spec_method="lookahead", **OPTIONS)
