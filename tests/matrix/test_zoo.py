"""The zoo is worth testing on: its texts vary, depend on what came before, and a wrong mask changes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FALLBACK, FAMILIES, WINDOW

pytestmark = pytest.mark.each_value_in_file
NAMES = [*FAMILIES, *FALLBACK]


def text_of(model: Any, prompt: torch.Tensor = PROMPT, **kwargs: Any) -> list[int]:
    output = plain(model, prompt, max_new_tokens=20, **{"do_sample": False, **kwargs})
    tokens: list[int] = output[0, -20:].tolist()
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_varies(zoo: Callable[[str], Any], name: str) -> None:
    """A model that repeats one token would pass every test."""
    assert len(set(text_of(zoo(name)))) >= 6


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_depends_on_the_tokens_before_the_last(zoo: Callable[[str], Any], name: str) -> None:
    """A sibling seen by mistake is a changed token a few places back; it must show."""
    changed = PROMPT.clone()
    changed[0, -3] += 1
    assert text_of(zoo(name), changed) != text_of(zoo(name))


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", NAMES)
def test_sampled_text_depends_on_the_seed(zoo: Callable[[str], Any], name: str) -> None:
    torch.manual_seed(1)
    first = text_of(zoo(name), do_sample=True)
    torch.manual_seed(2)
    assert text_of(zoo(name), do_sample=True) != first


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_the_window_is_shorter_than_the_prompt(zoo: Callable[[str], Any], name: str) -> None:
    """Without its window the model writes something else, so a lost window shows."""
    model = zoo(name)
    assert PROMPT.shape[1] > WINDOW
    expected = text_of(model)
    try:
        model.config.sliding_window = 1000
        assert text_of(model) != expected
    finally:
        model.config.sliding_window = WINDOW
    assert text_of(model) == expected
