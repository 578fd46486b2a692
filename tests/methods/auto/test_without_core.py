"""`auto` without a compiled core looks up n-grams; draft networks whose logits are no numbers change no text."""

import functools
import logging
import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels import native
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("with_head", [False, True])
def test_n_grams_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, with_head: bool, rows: int
) -> None:
    monkeypatch.setattr(native, "core", None)
    if with_head:
        model: Any = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")
        options = {"assistant_model": hf_specdec.AutoDraftHead.from_pretrained(embedded.path("head"))}
    else:
        model, options = hf_specdec.enable(build(FAMILIES["llama"])), {}
    ids = PROMPT.repeat(rows, 2)
    expected = plain(model, ids, max_new_tokens=24, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            output = model.generate(
                ids,
                max_new_tokens=24,
                do_sample=False,
                spec_method="auto",
                return_dict_in_generate=True,
                **options,
            )
            assert torch.equal(output.sequences, expected)
    assert output.spec_stats.num_accepted_tokens > 0
    warnings = [record.getMessage() for record in caplog.records if "n-grams" in record.getMessage()]
    assert warnings == ['spec_method="auto" looks up n-grams alone: no compiled core is installed']


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
