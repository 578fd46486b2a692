"""Defaults of torch that a caller sets change nothing of what the core reads and writes."""

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import embedded
from hf_specdec.engine.sampling import noise_ahead
from hf_specdec.forward.recorded import forwards


@pytest.fixture
def settings() -> Any:
    """Puts torch's defaults back."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    noise_ahead._core_computes_the_same.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_random_numbers_are_in_fp32_whatever_the_default_is(settings: None, dtype: torch.dtype) -> None:
    expected = noise_ahead._core_computes_the_same()
    noise_ahead._core_computes_the_same.cache_clear()
    torch.set_default_dtype(dtype)
    assert noise_ahead._core_computes_the_same() is expected


@pytest.mark.parametrize("do_sample", [False, True])
def test_records_are_made_on_the_host_whatever_the_default_is(
    settings: None, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "LEAST_FORWARDS", 2)
    prompt, texts = torch.arange(300, 306)[None], []
    for device in (None, "meta"):
        torch.set_default_device(None)
        model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="bf16")
        torch.set_default_device(device)
        torch.manual_seed(0)
        texts.append(model.generate(prompt, max_new_tokens=20, do_sample=do_sample, spec_method="plain"))
    assert torch.equal(*texts)
