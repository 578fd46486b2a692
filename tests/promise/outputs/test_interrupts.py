"""An exception or an interrupt mid-way leaves the model, the cache argument and the process as plain decoding does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.drafts import OracleDrafter
from tests.helpers.support import PROMPT, assert_same_cache, plain, seq_length, speculative
from tests.helpers.zoo import FAMILIES, build
from tests.promise.conftest import Draft

LENGTH, NUM_TOKENS, BREAK_AT = 30, 16, 6


class Bomb:
    """Goes off at its n-th use."""

    def __init__(self, error: BaseException, at: int = BREAK_AT) -> None:
        self.error, self.left = error, at

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


class Processor(LogitsProcessor):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.bomb.tick()
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.bomb.tick()
        return torch.zeros(1, dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def put(self, value: torch.Tensor) -> None:
        self.bomb.tick()

    def end(self) -> None: ...


PLACES: dict[str, Callable[[Bomb], dict[str, Any]]] = {
    "processor": lambda bomb: {"logits_processor": LogitsProcessorList([Processor(bomb)])},
    "criterion": lambda bomb: {"stopping_criteria": StoppingCriteriaList([Criterion(bomb)])},
    "streamer": lambda bomb: {"streamer": Streamer(bomb)},
}


@pytest.fixture(params=["llama", "mistral", "bloom"])
def broken_model(request: pytest.FixtureRequest, zoo: Callable[[str], Any]) -> Any:
    return zoo(request.param)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken")], ids=["interrupt", "error"])
def test_the_caller_can_go_on_after_it(broken_model: Any, draft: Draft, place: str, error: BaseException) -> None:
    """The same exception, a cache that holds what plain decoding's holds, and a model that generates as before."""
    model = broken_model
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    caches = []
    for generate, method in ((plain, {}), (speculative, draft(expected))):
        cache = DynamicCache(config=model.config)
        with pytest.raises(type(error)) as caught:
            generate(
                model,
                PROMPT,
                **{CACHE: cache},
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                **PLACES[place](Bomb(error)),
                **method,
            )
        assert caught.value is error
        caches.append(cache)
    assert_same_cache(caches[1], caches[0])

    written = torch.tensor([expected[: seq_length(caches[1]) + 1]])
    answer = plain(model, written, **{CACHE: caches[1]}, max_length=len(expected), do_sample=False)
    assert answer[0].tolist() == expected
    again = speculative(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False, **draft(expected))
    assert again[0].tolist() == expected


@pytest.mark.parametrize("at", range(2, 8))
@pytest.mark.parametrize("place", PLACES)
def test_states_that_cannot_be_cut_back_hold_what_plain_decoding_has_read(
    zoo: Callable[[str], Any], place: str, at: int
) -> None:
    """Also where a draft was accepted in part, when the state of before it was put back."""
    model, prompt = zoo("qwen3_next"), torch.tensor([[*range(5, 15), *range(5, 9), 20, 21]])
    caches = []
    for method in (None, "auto"):
        cache, error = DynamicCache(config=model.config), KeyboardInterrupt()
        config = {"num_nodes": 9, "pool": "request"} if method else None
        how = {**PLACES[place](Bomb(error, at)), "spec_method": method, "spec_config": config}
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt, **{CACHE: cache}, max_new_tokens=12, do_sample=False, **how)
        caches.append(cache)
    assert_same_cache(caches[1], caches[0])


def test_an_observer_that_fails_leaves_a_usable_cache(broken_model: Any, draft: Draft) -> None:
    model = broken_model
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    cache, bomb = DynamicCache(config=model.config), Bomb(RuntimeError("seen enough"), at=2)
    with pytest.raises(RuntimeError, match="seen enough"):
        speculative(
            model,
            PROMPT,
            **{CACHE: cache},
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            spec_observer=lambda step: bomb.tick(),
            **draft(expected),
        )
    assert LENGTH < seq_length(cache) < LENGTH + NUM_TOKENS
    written = torch.tensor([expected[: seq_length(cache) + 1]])
    answer = plain(model, written, **{CACHE: cache}, max_length=len(expected), do_sample=False)
    assert answer[0].tolist() == expected


def first_calls(model: Any, at: int, expected: list[int]) -> None:
    """The first calls on a model, one of whose forwards runs out of memory; refused or not, it must not be wrong."""
    bomb = Bomb(RuntimeError("out of memory"), at)
    handle = model.model.layers[1].register_forward_hook(lambda *_: bomb.tick())
    try:
        output = model.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False, spec_method="prompt_lookup")
        assert output[0].tolist() == expected
    except RuntimeError as error:
        assert error is bomb.error
    finally:
        handle.remove()


@pytest.mark.at_most(2)
@pytest.mark.parametrize("at", range(1, 7))
def test_a_mishap_while_the_model_is_tried_out_is_not_remembered(at: int) -> None:
    """What a model can do is found by forwards; one that fails for want of memory says nothing about the model."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    first_calls(model, at, expected)
    assert hf_specdec.capability(model).tier == "tree"


@pytest.mark.parametrize("at", [None, 1, 2, 3])
def test_a_drafter_is_told_of_the_end_of_each_text_it_has_begun(model: Any, at: int | None) -> None:
    """Once, after an error as well; and its own complaints never hide that error."""
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    drafter, bomb = OracleDrafter(expected), Bomb(RuntimeError("out of memory"), -1)
    handle = model.model.layers[1].register_forward_hook(lambda *_: bomb.tick())
    hf_specdec.capability(model)  # with the hook, or the probe would set it off
    bomb.left = at or -1
    try:
        model.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False, spec_method=drafter)
    except RuntimeError as error:
        assert error is bomb.error
    finally:
        handle.remove()
    assert drafter.num_ends == (1 if drafter.text else 0)
    assert bool(drafter.text) == (at != 1)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_forward_that_fails_half_way_leaves_a_usable_cache(model: Any, draft: Draft, at: int, layer: int) -> None:
    """Some layers have the new columns and some have not; the cache argument has the text all the same."""
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    start = plain(model, PROMPT[:, :20], max_new_tokens=1, return_dict_in_generate=True)[CACHE]
    cache, bomb = copy.deepcopy(start), Bomb(RuntimeError("out of memory"), -1)
    handle = model.model.layers[layer].register_forward_hook(lambda *_: bomb.tick())
    hf_specdec.capability(model)  # found beforehand, so that the forwards below are the call's own
    bomb.left = at
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            speculative(model, PROMPT, **{CACHE: cache}, max_new_tokens=NUM_TOKENS, do_sample=False, **draft(expected))
    finally:
        handle.remove()
    assert seq_length(cache) >= 20
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert len(lengths) == 1, "all layers hold the same text"
    written = torch.tensor([expected[: max(seq_length(cache) + 1, LENGTH)]])
    answer = plain(model, written, **{CACHE: cache}, max_length=len(expected), do_sample=False)
    assert answer[0].tolist() == expected


def test_an_interrupted_sampled_call_leaves_the_random_state_of_plain_decoding(model: Any, draft: Draft) -> None:
    """As many draws as tokens were emitted."""
    torch.manual_seed(7)
    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=True)[0].tolist()
    states = []
    for generate, method in ((plain, {}), (speculative, draft(expected))):
        torch.manual_seed(7)
        with pytest.raises(KeyboardInterrupt):
            generate(
                model,
                PROMPT,
                max_new_tokens=NUM_TOKENS,
                do_sample=True,
                **PLACES["criterion"](Bomb(KeyboardInterrupt())),
                **method,
            )
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


def test_nothing_is_left_on_the_model(model: Any, draft: Draft) -> None:
    """No hooks, settings or attributes that were not there after an undisturbed call."""

    def hooks() -> list[tuple[int, int]]:
        return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]

    expected = plain(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    speculative(model, PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False, **draft(expected))
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    before = hooks()
    with pytest.raises(KeyboardInterrupt):
        speculative(
            model,
            PROMPT,
            max_new_tokens=NUM_TOKENS,
            **PLACES["processor"](Bomb(KeyboardInterrupt())),
            **draft(expected),
        )
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert hooks() == before
