"""Draft networks whose logits are no numbers, as fp16 weights may make them, change no text and stop nothing."""

import functools
import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec import embedded
from tests.helpers.support import plain


@functools.cache
def target() -> tuple[Any, torch.Tensor]:
    path = embedded.path("target")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")
    return model, AutoTokenizer.from_pretrained(path)("def add(a, b):\n    return ", return_tensors="pt").input_ids


@pytest.mark.at_most(3)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("method", ["auto", "eagle3"])
def test_a_head_whose_logits_are_nan(method: str, do_sample: bool) -> None:
    model, prompt = target()
    head = hf_specdec.AutoDraftHead.from_pretrained(embedded.path("head"))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(math.nan)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": do_sample}
    torch.manual_seed(0)
    expected = plain(model, input_ids=prompt, **options)
    torch.manual_seed(0)
    ours = model.generate(prompt, spec_method=method, assistant_model=head, **options)
    assert ours.tolist() == expected.tolist()
