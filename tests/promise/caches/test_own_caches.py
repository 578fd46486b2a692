"""Caches with code of the caller's: a class of one's own, a layer class, a method replaced on an object or a class."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import DRAFTS, MASK, PADDED, PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

KEPT = 20  # columns, fewer than the prompt has
METHODS = ["plain", "prompt_lookup", "lookahead", "auto"]
CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}


def evicted(states: torch.Tensor) -> torch.Tensor:
    """The first four columns and the last ones."""
    return torch.cat([states[..., :4, :], states[..., -(KEPT - 4) :, :]], dim=-2) if states.shape[-2] > KEPT else states


def rounded(states: torch.Tensor) -> torch.Tensor:
    """To a sixteenth, as quantisation at home does."""
    return (states * 16).round() / 16


class SinkLayer(DynamicLayer):
    """Evicts what is neither among the first columns nor among the last ones."""

    def update(self, *states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = super().update(*states, **kwargs)
        self.keys, self.values = evicted(self.keys), evicted(self.values)
        return result


class SinkCache(DynamicCache):
    """The same, as a cache."""

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        result = super().update(keys, values, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.keys, layer.values = evicted(layer.keys), evicted(layer.values)
        return result


class Rounding:
    """A mixin in front of a class of transformers'."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(keys), rounded(values), *args, **kwargs)  # type: ignore[misc]


class RoundedStatic(Rounding, StaticCache):
    """A static cache of one's own."""


def with_layers(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    cache.layers = [SinkLayer() for _ in cache.layers]
    return cache


def with_a_layer_class(model: Any) -> Any:
    cache = DynamicCache()
    cache.layer_class_to_replicate = SinkLayer
    return cache


def with_its_own_update(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    update = cache.update
    cache.update = lambda keys, values, *a, **kw: update(rounded(keys), rounded(values), *a, **kw)  # type: ignore[method-assign]
    return cache


def with_a_layer_s_own_update(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    layer = cache.layers[0]

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return DynamicLayer.update(self, rounded(keys), rounded(values), *args, **kwargs)

    layer.update = types.MethodType(update, layer)
    return cache


CACHES: dict[str, Callable[[Any], Any]] = {
    "class": lambda model: SinkCache(config=model.config),
    "layers": with_layers,
    "layer class": with_a_layer_class,
    "bare": lambda model: Cache(layer_class_to_replicate=SinkLayer),
    "update of an object": with_its_own_update,
    "update of a layer": with_a_layer_s_own_update,
    "static": lambda model: RoundedStatic(config=model.config, max_cache_len=128),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


def same(ours: Any, expected: Any) -> None:
    """The same text, and the caller's own cache holds what plain generation leaves in it."""
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert type(ours[CACHE]) is type(expected[CACHE])
    for mine, other in zip(ours[CACHE].layers, expected[CACHE].layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
    assert ours.spec_stats.plain_reason and ours.spec_stats.num_accepted_tokens == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_with_code_of_the_callers_is_used_as_plain_generation_uses_it(
    model: Any, kind: str, method: str
) -> None:
    expected = plain(model, PROMPT, **CALL, **{CACHE: CACHES[kind](model)})
    assert expected.sequences.tolist() != plain(model, PROMPT, **CALL).sequences.tolist()
    inputs = CACHES[kind](model)
    ours = model.generate(PROMPT, **CALL, **{CACHE: inputs}, spec_method=method)
    assert ours[CACHE] is inputs
    same(ours, expected)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["class", "update of an object"])
def test_rows_and_samples_over_such_a_cache_are_plain_generations(model: Any, kind: str, sampled: bool) -> None:
    call = CALL | {"input_ids": PADDED, "attention_mask": MASK, "do_sample": sampled}
    torch.manual_seed(3)
    expected = plain(model, **call, **{CACHE: CACHES[kind](model)})
    torch.manual_seed(3)
    same(model.generate(**call, **{CACHE: CACHES[kind](model)}, spec_method="prompt_lookup"), expected)


@pytest.mark.parametrize("whose", [DynamicCache, Cache, DynamicLayer])
@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_an_update_replaced_for_the_whole_process_is_not_left_out(
    model: Any, monkeypatch: pytest.MonkeyPatch, whose: type, method: str
) -> None:
    """Wrapped in the original's name and module, as decorators do."""
    original = whose.update

    @functools.wraps(original)
    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, rounded(keys), rounded(values), *args, **kwargs)

    usual = plain(model, PROMPT, **CALL).sequences.tolist()
    monkeypatch.setattr(whose, "update", update)
    expected = plain(model, PROMPT, **CALL)
    assert expected.sequences.tolist() != usual
    same(model.generate(PROMPT, **CALL, spec_method=method), expected)
    hf_specdec.enable(hf_specdec.disable(model))  # the probe has seen it


def test_a_cache_class_that_the_model_makes_is_used_as_plain_generation_uses_it() -> None:
    """A class whose `generate` begins with a cache of its own, which evicts beyond what a probe reads."""
    model = copy.deepcopy(build(FAMILIES["llama"]))
    prepare = model._prepare_cache_for_generation

    def prepare_own(config: Any, kwargs: dict[str, Any], *args: Any) -> None:
        prepare(config, kwargs, *args)
        kwargs[CACHE] = SinkCache(config=model.config)

    model._prepare_cache_for_generation = prepare_own
    expected = plain(model, PROMPT, **CALL)
    hf_specdec.enable(model)
    for draft in ("prompt_lookup", "oracle"):
        how = DRAFTS[draft](expected.sequences[0].tolist())
        same(model.generate(PROMPT, **CALL, **how), expected)


def test_unchanged_caches_are_not_taken_for_others(model: Any) -> None:
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        output = model.generate(PROMPT, **CALL, **{CACHE: cache}, spec_method="prompt_lookup")
        assert output.spec_stats.plain_reason is None
        assert output[CACHE] is cache
