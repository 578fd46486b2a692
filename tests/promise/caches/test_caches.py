"""A cache goes in and comes out as with plain decoding: chat turns may switch between the two at will."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec.compat.caches import CACHE, CACHE_ARGUMENTS
from tests.helpers.support import (
    CHAIN_DRAFTS,
    DRAFTS,
    PROMPT,
    assert_same_cache,
    assert_same_run,
    both,
    plain,
    run,
    seq_length,
    speculative,
)
from tests.helpers.zoo import WINDOW
from tests.helpers.zoo_wide import varied
from tests.promise.conftest import Draft

FAMILIES = ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "bloom"]
MORE = torch.tensor([[8, 9, 10, 5, 6, 7]])


def turn(
    model: Any, text: torch.Tensor, cache: Any, draft: Draft | None, num_tokens: int = 8
) -> tuple[torch.Tensor, Any]:
    """One chat turn: the text with the answer and a few tokens of the next question, and the cache."""

    def make() -> dict[str, Any]:
        return {"input_ids": text, CACHE: copy.deepcopy(cache), "max_new_tokens": num_tokens}

    reference = run(model, plain, make)
    ours = reference if draft is None else run(model, speculative, make, **draft(reference.ids))
    return torch.cat([ours.output.sequences, MORE], dim=1), ours.output[CACHE]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ours", [(1,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_a_conversation_is_the_same_whoever_answers(
    zoo: Callable[[str], Any], draft: Draft, family: str, ours: tuple[int, ...]
) -> None:
    """Four turns, each handing its cache to the next; in `ours` the turns that are drafted."""
    model = zoo(family)
    text, cache = PROMPT, None
    expected_text, expected_cache = PROMPT, None
    for number in range(4):
        expected_text, expected_cache = turn(model, expected_text, expected_cache, None)
        text, cache = turn(model, text, cache, draft if number in ours else None)
        assert text.tolist() == expected_text.tolist()
        assert_same_cache(cache, expected_cache)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_by_the_names_that_plain_generate_knows(zoo: Callable[[str], Any], name: str) -> None:
    """transformers warns of the old one, and before 5.24 refuses the new one."""
    model, caches = zoo("llama"), [DynamicCache(), DynamicCache()]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    if name not in CACHE_ARGUMENTS:
        for inputs in ({}, {"spec_method": "prompt_lookup"}):
            with pytest.raises(ValueError, match=name):
                model.generate(PROMPT, **{name: caches[0]}, **options, **inputs)
        return
    is_old = pytest.warns(FutureWarning, match=name) if name != CACHE else contextlib.nullcontext()
    with is_old:
        expected = plain(model, PROMPT, **{name: caches[0]}, **options).tolist()
    answer = speculative(model, PROMPT, **{name: caches[1]}, **options, **DRAFTS["oracle"](expected[0]))
    assert answer.tolist() == expected
    assert_same_cache(caches[1], caches[0])
    with pytest.raises(hf_specdec.ConfigError, match=f"`{name}`"):
        hf_specdec.generate_many(model, [PROMPT[0]], **{name: DynamicCache()})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_is_passed_in_is_updated_in_place(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """The object the caller holds has the new text, and is the one in the output."""
    model = zoo(family)
    reference, ours = both(model, lambda: {CACHE: DynamicCache(config=model.config)}, draft)
    assert_same_run(ours, reference)
    cache = ours.kwargs[CACHE]
    assert ours.output[CACHE] is cache
    assert_same_cache(cache, reference.kwargs[CACHE])
    assert seq_length(cache) == len(ours.ids) - 1
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in reference.kwargs[CACHE].layers]


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("prompt_length", [WINDOW - 9, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_windows_slide_as_in_plain_decoding(
    zoo: Callable[[str], Any], draft: Draft, family: str, prompt_length: int
) -> None:
    """From before the window is full to far beyond it, and on with the cache that came out."""
    model = zoo(family)
    prompt = PROMPT.repeat(1, 2)[:, :prompt_length]
    reference, ours = both(model, lambda: {"input_ids": prompt, "max_new_tokens": 24}, draft)
    assert_same_run(ours, reference)
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])
    text = torch.cat([ours.output.sequences, MORE], dim=1)
    answers = [
        plain(model, text, **{CACHE: item.output[CACHE]}, max_new_tokens=8, do_sample=False).tolist()
        for item in (ours, reference)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_new_tokens_may_be_given_with_a_full_mask(
    zoo: Callable[[str], Any], draft: Draft, family: str
) -> None:
    """The cache holds the rest; the attention mask tells how much that is."""
    model = zoo(family)
    first = plain(model, PROMPT, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    new = torch.cat([first.sequences[:, -1:], MORE], dim=1)
    total = seq_length(first[CACHE]) + new.shape[1]

    def make() -> dict[str, Any]:
        return {
            "input_ids": new,
            "attention_mask": torch.ones(1, total, dtype=torch.long),
            CACHE: copy.deepcopy(first[CACHE]),
        }

    reference, ours = both(model, make, draft)
    assert_same_run(ours, reference)
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])


def test_a_cache_from_a_prefill_forward_is_continued(model: Any, draft: Draft) -> None:
    """A prompt cached once and used for many questions, as in transformers' guide to prefix caching."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT[:, :20], **{CACHE: cache})
    reference, ours = both(model, lambda: {CACHE: copy.deepcopy(cache)}, draft)
    assert_same_run(ours, reference)
    assert seq_length(cache) == 20


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_states_that_one_token_more_is_read_into_in_place_are_continued(zoo: Callable[[str], Any], family: str) -> None:
    """An answer whose last token its cache lacks goes on, as after a limit of new tokens."""
    model, options = zoo(family), {"do_sample": False, "max_new_tokens": 12, "spec_method": "prompt_lookup"}
    expected = plain(model, PROMPT, do_sample=False, max_new_tokens=24).tolist()
    cache = DynamicCache(config=model.config)
    text = speculative(model, PROMPT, **{CACHE: cache}, **options)
    assert speculative(model, text, **{CACHE: cache}, **options).tolist() == expected


@pytest.mark.parametrize("chunk", [7, 16, 100])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_prompt_read_in_chunks_is_read_the_same(
    zoo: Callable[[str], Any], draft: Draft, family: str, chunk: int
) -> None:
    reference, ours = both(zoo(family), lambda: {"prefill_chunk_size": chunk}, draft)
    assert_same_run(ours, reference)


@pytest.mark.parametrize("draft", CHAIN_DRAFTS, indirect=True)
def test_an_encoder_decoder_cache_comes_back_for_the_next_call(zoo: Callable[[str], Any], draft: Draft) -> None:
    model = zoo("t5")
    reference, ours = both(model, dict, draft)
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])
    assert type(ours.output[CACHE]) is type(reference.output[CACHE])
    text = torch.cat([ours.output.sequences, MORE], dim=1)
    answers = [
        plain(
            model,
            PROMPT,
            decoder_input_ids=text,
            decoder_attention_mask=torch.ones_like(text),
            **{CACHE: item.output[CACHE]},
            max_new_tokens=8,
            do_sample=False,
        ).tolist()
        for item in (ours, reference)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("draft", CHAIN_DRAFTS, indirect=True)
@pytest.mark.parametrize("whose", ["plain", "ours", "empty"])
def test_a_cache_class_of_the_models_own_file_is_continued(draft: Draft, whose: str) -> None:
    """MiniMax keeps its recurrent states in a subclass of `DynamicCache`, next to the layers."""
    model = hf_specdec.enable(varied("minimax", "causal"))
    method = {"plain": {}, "ours": {"spec_method": "prompt_lookup"}, "empty": {}}[whose]
    generate = speculative if method else plain
    first = generate(model, PROMPT, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **method)
    cache = type(first[CACHE])() if whose == "empty" else first[CACHE]
    text = torch.cat([first.sequences, MORE], dim=1)
    reference, ours = both(model, lambda: {"input_ids": text, CACHE: copy.deepcopy(cache)}, draft)
    assert_same_run(ours, reference)
    assert_same_cache(ours.kwargs[CACHE], reference.kwargs[CACHE])


@pytest.mark.parametrize("draft", CHAIN_DRAFTS, indirect=True)
def test_a_cache_that_the_model_ignores_is_left_empty(draft: Draft) -> None:
    """RWKV writes a state of its own, whatever is passed as `past_key_values`."""
    model = hf_specdec.enable(varied("rwkv", "causal"))
    reference, ours = both(model, lambda: {CACHE: DynamicCache()}, draft)
    assert_same_run(ours, reference)
    assert ours.output[CACHE] is ours.kwargs[CACHE]
    assert seq_length(ours.kwargs[CACHE]) == seq_length(reference.kwargs[CACHE]) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "bloom"])
def test_a_padded_conversation_goes_on_with_its_cache(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """Padding in front stays masked in the turns that follow."""
    model = zoo(family)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(35) >= 5).long()[None]
    first = plain(model, padded, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    text = torch.cat([first.sequences, MORE], dim=1)

    def make() -> dict[str, Any]:
        return {
            "input_ids": text,
            "attention_mask": torch.cat([mask, torch.ones(1, text.shape[1] - 35, dtype=torch.long)], dim=1),
            CACHE: copy.deepcopy(first[CACHE]),
        }

    reference, ours = both(model, make, draft)
    assert_same_run(ours, reference)
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])


def test_where_caching_is_left_open_the_text_is_that_of_plain_generate(model: Any, draft: Draft) -> None:
    """With `use_cache=None` it caches the whole text again with each token."""
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_cache": None, "return_dict_in_generate": True}
    expected = plain(model, PROMPT, **call)
    ours = speculative(model, PROMPT, **call, **draft(expected.sequences[0].tolist()))
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_cache(ours[CACHE], expected[CACHE])
    (result,) = hf_specdec.generate_many(model, [PROMPT[0]], **call)
    assert result.token_ids == expected.sequences[0, PROMPT.shape[1] :].tolist()
