"""Without a compiled core `auto` looks up n-grams, says so once, and writes plain generation's text."""

import logging
from typing import Any

import pytest
import torch

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
