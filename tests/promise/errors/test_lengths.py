"""Lengths that are no integers."""

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 2.5), ("max_new_tokens", "6"), ("min_new_tokens", "2")])
def test_a_length_that_is_no_integer_is_named(model: Any, name: str, value: object) -> None:
    enabled = hf_specdec.enable(model)
    with pytest.raises(ConfigError, match=rf"`{name}` must be an integer.*Pass an int"):
        enabled.generate(torch.arange(5, 12)[None], spec_method="prompt_lookup", **{name: value})
