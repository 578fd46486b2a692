"""What `return_dict_in_generate` shows of a batch: plain generate's texts and cache; scores decode plainly."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from hf_specdec.compat.caches import CACHE
from tests.helpers.support import (
    MASK,
    METHODS,
    PADDED,
    assert_same_cache,
    assert_same_tensors,
    method_of,
    noisy_copy,
    plain,
)
from tests.helpers.zoo import FALLBACK, FAMILIES

OPTIONS: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
DICT: dict[str, Any] = {"return_dict_in_generate": True}


@pytest.fixture(scope="module")
def families(zoo: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any, list[list[int]]]]:
    @cache
    def family(name: str) -> tuple[Any, Any, list[list[int]]]:
        model = zoo(name)
        start = 1 if model.config.is_encoder_decoder else PADDED.shape[1]
        new: list[list[int]] = plain(model, PADDED, **OPTIONS)[:, start:].tolist()
        return model, noisy_copy(model), new

    return family


def assert_same_outputs(model: Any, method: dict[str, Any], **kwargs: Any) -> None:
    """Tokens and the cache."""
    expected = plain(model, PADDED, **DICT | OPTIONS | kwargs)
    ours = model.generate(PADDED, **DICT | OPTIONS | kwargs, **method)
    assert ours.spec_stats.plain_reason is None
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_cache(ours[CACHE], expected[CACHE])


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FALLBACK])
def test_every_row_shows_what_plain_generate_shows(families: Callable[[str], Any], family: str, method: str) -> None:
    """Rows end at different places; the cache holds the padding that plain generation feeds after a row's end."""
    if FAMILIES[family].tier == "chain":
        return
    model, draft, new = families(family)
    assert_same_outputs(model, method_of(method, draft), eos_token_id=[new[0][2], new[1][6]])


SETTINGS: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "one row ends at once": lambda new: {"eos_token_id": new[0][0]},
    "all rows end at once": lambda new: {"eos_token_id": sorted({row[0] for row in new})},
    "no row ends early": lambda _: {},
    "one new token": lambda _: {"max_new_tokens": 1},
    "padding is the end": lambda new: {"eos_token_id": new[0][4], "pad_token_id": new[0][4]},
    "a processor sees the padding": lambda new: {
        "eos_token_id": new[0][4],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
    },
    "prompts read in chunks": lambda new: {"prefill_chunk_size": 7, "eos_token_id": new[0][4]},
    "a long rest": lambda new: {"eos_token_id": new[0][2], "max_new_tokens": 40},
}


@pytest.mark.at_most(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_every_setting_shows_the_same(families: Callable[[str], Any], family: str, method: str, setting: str) -> None:
    model, draft, new = families(family)
    assert_same_outputs(model, method_of(method, draft), **SETTINGS[setting](new))


@pytest.mark.parametrize("shown", ["scores", "logits", "hidden_states"])
def test_what_a_batch_shows_of_each_token_is_decoded_plainly(families: Callable[[str], Any], shown: str) -> None:
    model, _, new = families("llama")
    call = OPTIONS | DICT | {f"output_{shown}": True, "eos_token_id": new[0][2]}
    expected, ours = plain(model, PADDED, **call), model.generate(PADDED, **call, spec_method="auto")
    assert f"output_{shown}" in ours.spec_stats.plain_reason
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_tensors(getattr(ours, shown), getattr(expected, shown))


def test_what_is_shown_keeps_no_whole_steps_in_memory(families: Callable[[str], Any]) -> None:
    model, _, _ = families("llama")
    call = OPTIONS | DICT | {"attention_mask": MASK[:1], "output_scores": True, "output_logits": True}
    ours = model.generate(PADDED[:1], **call, spec_method="prompt_lookup")
    assert ours.spec_stats.plain_reason is None
    shown = [*ours.scores, *ours.logits]
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in shown)
