"""Caches of batches: conversations of several rows, interrupted calls, models' positions, states kept in step."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from hf_specdec.compat.caches import CACHE
from tests.helpers.support import (
    MASK,
    METHODS,
    PADDED,
    assert_same_cache,
    method_of,
    noisy_copy,
    plain,
    seq_length,
)

OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture(scope="module")
def pairs(zoo: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    return cache(lambda name: (zoo(name), noisy_copy(zoo(name))))


class Interrupted(BaseException):
    """Raised by the caller's own code."""


def conversation(model: Any, turns: list[dict[str, Any]], eos: list[int]) -> tuple[list[Any], Any]:
    """Turns of a padded batch over one cache; rows end at different places, and padding stays between the turns."""
    kept, ids, mask, texts = tf.DynamicCache(config=model.config), PADDED, MASK, []
    for number, method in enumerate(turns):
        generate = model.generate if method else lambda *args, **kwargs: plain(model, *args, **kwargs)
        out = generate(ids, attention_mask=mask, **{CACHE: kept}, eos_token_id=eos, **OPTIONS, **method)
        texts.append(out.tolist())
        wanted = (torch.arange(15).view(3, 5) * 7 + 11 * number) % 120 + 5
        mask = torch.cat([mask, mask.new_ones(3, out.shape[1] - ids.shape[1] + 5)], dim=1)
        ids = torch.cat([out, wanted], dim=1)
    return texts, kept


@pytest.mark.at_most(1)
@pytest.mark.parametrize("order", ["ours", "plain first", "ours first"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "qwen3_next"])
def test_a_conversation_of_several_rows_is_the_same_whoever_answers(
    pairs: Callable[[str], Any], family: str, method: str, order: str
) -> None:
    model, draft = pairs(family)
    free = plain(model, PADDED, attention_mask=MASK, **OPTIONS)
    eos = [int(free[0, 33]), int(free[1, 36])]
    ours = method_of(method, draft)
    turns = {"ours": [ours] * 3, "plain first": [{}, ours, {}], "ours first": [ours, {}, ours]}[order]
    texts, kept = conversation(model, turns, eos)
    expected_texts, expected = conversation(model, [{}] * 3, eos)
    assert texts == expected_texts
    assert_same_cache(kept, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "qwen3_next"])
def test_after_an_interrupt_the_rows_go_on_from_their_cache(
    pairs: Callable[[str], Any], family: str, method: str, at: int
) -> None:
    """It holds the texts as far as all rows have them; one with states may be as it was before the call."""
    model, draft = pairs(family)
    expected = plain(model, PADDED, attention_mask=MASK, **OPTIONS | {"max_new_tokens": 16})
    kept, calls = tf.DynamicCache(config=model.config), iter(range(at))

    def interrupt(*_: Any) -> None:
        if next(calls, None) is None:
            raise Interrupted

    with pytest.raises(Interrupted):
        model.generate(
            PADDED,
            attention_mask=MASK,
            **{CACHE: kept},
            spec_observer=interrupt,
            **OPTIONS | {"max_new_tokens": 16},
            **method_of(method, draft),
        )
    is_empty = family in ("lfm2", "qwen3_next") and seq_length(kept) == 0
    length = PADDED.shape[1] if is_empty else seq_length(kept) + 1
    assert is_empty or length > PADDED.shape[1]
    mask = torch.cat([MASK, MASK.new_ones(3, length - MASK.shape[1])], dim=1)
    rest = {"max_new_tokens": expected.shape[1] - length, "do_sample": False}
    again = plain(model, expected[:, :length], attention_mask=mask, **{CACHE: kept}, **rest)
    assert again.tolist() == expected.tolist()
