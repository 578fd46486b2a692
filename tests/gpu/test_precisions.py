"""fp8, int8 and nf4 on a CUDA device. Run with -m gpu."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels.quantization import fp8_linear
from hf_specdec.kernels.quantization.e4m3 import quantize_rows
from hf_specdec.kernels.quantization.fp8_linear import Fp8Linear, multiplies_fp8, scaled_linear, widened_linear
from hf_specdec.kernels.quantization.report import FIXED_TEXT, loaded_weights, logit_error, precision_of
from tests.helpers.support import plain
from tests.promise.models.test_precisions import METHODS, NEAR_TIE, QUANTISED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
TARGET = embedded.path("target")
has_fp8 = pytest.mark.skipif(
    not (torch.cuda.is_available() and multiplies_fp8(torch.device("cuda", 0))),
    reason="needs a device that multiplies FP8 (compute capability 8.9)",
)


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
    assert loaded_weights(model).parameter_bytes < 0.62 * loaded_weights(on_cuda("bf16")).parameter_bytes


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


@pytest.mark.parametrize(("precision", "most"), [("fp8", 0.03), ("int8", 0.01), ("nf4", 0.1)])
def test_logits_stay_near_those_of_bf16(precision: str, most: float) -> None:
    """Three to ten times what was measured on a CPU for the embedded target."""
    assert logit_error(on_cuda(precision), on_cuda("bf16"), code(FIXED_TEXT)).mean_kl < most


@has_fp8
def test_fp8_is_multiplied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer goes by the row-wise multiplication, and the report says so."""
    model = on_cuda("fp8")
    called: list[torch.Size] = []
    real = scaled_linear
    monkeypatch.setattr(fp8_linear, "scaled_linear", lambda *args: called.append(args[1].shape) or real(*args))
    with torch.no_grad():
        model(code("def main():\n"))
    assert len(called) == sum(isinstance(module, Fp8Linear) for module in model.modules()) == 42
    assert "FP8 matrix multiplication by row" in str(loaded_weights(model).fp8_backend)


@has_fp8
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_fp8_multiplication_computes_what_the_weight_says(num_tokens: int) -> None:
    """Against float64, within the rounding of the activations; one token's result does not depend on the others."""
    torch.manual_seed(0)
    codes, scale = (part.cuda() for part in quantize_rows(torch.randn(96, 64) / 8))
    bias = torch.randn(96, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, num_tokens, 64, device="cuda").to(torch.bfloat16)
    expected = x.double() @ (codes.float().double() * scale.double()).t() + bias.double()
    y = scaled_linear(x, codes, scale, bias)
    assert (y.double() - expected).abs().max() <= 0.06 * expected.abs().max()
    assert torch.equal(scaled_linear(x[:, -1:], codes, scale, bias), y[:, -1:])


def test_widened_weights_are_exact_on_the_device_too() -> None:
    """For devices that do not multiply FP8."""
    codes, scale = quantize_rows(torch.randn(96, 64))
    x = torch.randn(3, 64).to(torch.bfloat16)
    expected = x.double() @ (codes.float().double() * scale.double()).t()
    found = widened_linear(x.cuda(), codes.cuda(), scale.cuda(), only_normal=True).cpu()
    assert (found.double() - expected).abs().max() <= 2e-2 * expected.abs().max()


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
