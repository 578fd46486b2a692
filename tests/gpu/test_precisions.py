"""fp8, int8 and nf4 on a CUDA device. Run with -m gpu."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels.quantization.weights import parameter_bytes, precision_of
from tests.helpers.support import plain
from tests.promise.models.test_precisions import METHODS, NEAR_TIE, QUANTISED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
TARGET = embedded.path("target")


def on_cuda(precision: str) -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(TARGET, precision=precision, device_map="cuda")


def code(text: str) -> torch.Tensor:
    ids: torch.Tensor = tf.AutoTokenizer.from_pretrained(TARGET)(text, return_tensors="pt").input_ids
    return ids.cuda()


@pytest.mark.parametrize("precision", QUANTISED)
def test_it_loads_there_in_its_bytes(precision: str) -> None:
    model = on_cuda(precision)
    assert precision_of(model) == precision
    assert {weight.device.type for weight in model.parameters()} == {"cuda"}
    assert parameter_bytes(model) < 0.62 * parameter_bytes(on_cuda("bf16"))


@pytest.mark.parametrize("precision", QUANTISED)
def test_texts_part_only_at_near_ties(precision: str) -> None:
    """Every method against plain `generate` at the same precision."""
    model = on_cuda(precision)
    ids = code("class Stack:\n    def __init__(self")
    expected = plain(model, ids, **SETTINGS)[0].tolist()
    for method, how in METHODS.items():
        how = how | ({"assistant_model": model} if how["spec_method"] == "draft_model" else {})
        found = model.generate(ids, **SETTINGS, **how)[0].tolist()
        at = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1), None)
        if at is not None:
            with torch.no_grad():
                logits = model(torch.tensor([expected[:at]], device="cuda")).logits[0, -1].float()
            assert abs(logits[expected[at]] - logits[found[at]]) <= NEAR_TIE * logits.abs().max(), method


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_saved_model_loads_again(tmp_path: Path, precision: str) -> None:
    """After a forward too: only CPUs pack nf4 in place."""
    model = on_cuda(precision)
    ids = code("def main():\n")
    expected = plain(model, ids, **SETTINGS)
    model.save_pretrained(tmp_path)
    again = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    assert plain(again, ids, **SETTINGS).tolist() == expected.tolist()


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_draft_lies_there_in_its_precision(precision: str) -> None:
    """In fp32 the target's text is the target's, whatever the draft."""
    target = on_cuda("fp32")
    draft = hf_specdec.AutoModelForCausalLM.from_pretrained(
        embedded.path("draft"), precision=precision, device_map="cuda"
    )
    ids = code("def read(path):\n    ")
    expected = plain(target, ids, **SETTINGS)
    output = target.generate(
        ids, **SETTINGS, spec_method="draft_model", assistant_model=draft, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > 0
