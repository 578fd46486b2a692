"""Sampling with drafts that know the random numbers of the coming draws: the seed's text, and drafts that meet it."""

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import PROMPT, noisy_copy
from tests.helpers.zoo import DECODER, FAMILIES, VOCAB_SIZE, build

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 20},
    "all": {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2},
}
CHAIN: dict[str, Any] = {"max_draft_len": 4, "confidence_threshold": 0.0}
TREE = {**CHAIN, "num_branches": 3, "max_nodes": 12}
BATCH = {"input_ids": PROMPT.repeat(2, 1), "attention_mask": torch.ones(2, PROMPT.shape[1], dtype=torch.long)}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


def acceptance(model: Any, draft: Any, method: str = "draft_model", **options: Any) -> float:
    """Accepted tokens over steps; the text is checked against plain generation's."""
    arguments = {"max_new_tokens": 30, "do_sample": True, "return_dict_in_generate": True, **options}
    prompt = arguments.pop("input_ids", PROMPT)
    torch.manual_seed(5)
    ours = model.generate(prompt, spec_method=method, assistant_model=draft, **arguments)
    if len(prompt) == 1:
        arguments = {name: value for name, value in arguments.items() if name != "spec_config"}
        torch.manual_seed(5)
        assert ours.sequences.tolist() == model.generate(prompt, spec_method=None, **arguments).sequences.tolist()
    stats = ours.spec_stats
    return float(stats.num_accepted_tokens / stats.num_drafts)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("filters", FILTERS)
def test_a_draft_that_is_the_target_drafts_what_is_drawn(model: Any, filters: str) -> None:
    """However random the text: four tokens a step, but for the last step."""
    assert acceptance(model, copy.deepcopy(model), spec_config=CHAIN, **FILTERS[filters]) > 3.5


def test_so_does_one_of_a_batch(model: Any) -> None:
    assert acceptance(model, copy.deepcopy(model), spec_config=CHAIN, top_k=0, **BATCH) > 3.5


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_near_the_target_is_accepted_more_often(
    model: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than where it drafts its likeliest tokens."""
    draft = noisy_copy(model)
    seen = acceptance(model, draft, spec_config=config, top_k=0)
    monkeypatch.setattr("hf_specdec.engine.sampling.noise_ahead.NoiseAhead.of", lambda stream: None)
    assert seen > 1.5 * acceptance(model, draft, spec_config=config, top_k=0)


def test_a_processor_that_draws_costs_drafts_and_nothing_else(model: Any) -> None:
    """What was made ahead does not fit then, and the text is the seed's."""

    class Draws:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 0.01 * torch.randn(scores.shape)

    draft = copy.deepcopy(model)
    assert acceptance(model, draft, spec_config=CHAIN, logits_processor=[Draws()], top_k=0) < 3.0


class Counting:
    """A constraint of the user's: counts its calls, forbids more on every second one, and cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.lengths = threading.Lock(), list[int]()

    def __call__(self, batch: int, ids: torch.Tensor) -> list[int]:
        self.lengths.append(len(ids))
        return list(range(0, VOCAB_SIZE, 1 + len(self.lengths) % 2))


@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_drafts_leave_a_users_constraint_alone(model: Any, method: str) -> None:
    """It is asked once for each token of the text, as by plain decoding."""
    draft, kept, texts = copy.deepcopy(model), [Counting(), Counting()], []
    for allowed, spec_method in zip(kept, (None, method), strict=True):
        torch.manual_seed(5)
        inputs = {} if spec_method is None else {"assistant_model": draft}
        options = {"max_new_tokens": 9, "do_sample": True, "prefix_allowed_tokens_fn": allowed, **inputs}
        texts.append(model.generate(PROMPT, spec_method=spec_method, **options).tolist())
    assert texts[0] == texts[1]
    assert kept[0].lengths == kept[1].lengths == list(range(PROMPT.shape[1], PROMPT.shape[1] + 9))


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_token_that_is_forced_may_be_none_of_the_drafts(model: Any, config: dict[str, Any]) -> None:
    draft = build(dataclasses.replace(FAMILIES["llama"], options={**DECODER, "vocab_size": VOCAB_SIZE - 8}))
    options = {"max_new_tokens": 6, "forced_eos_token_id": VOCAB_SIZE - 1, "spec_config": config}
    acceptance(model, draft, **options)
