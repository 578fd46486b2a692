"""On a CUDA device: the same tokens as plain `generate` in fp32, wherever inputs and model lie. Run with -m gpu."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.drafts import OracleDrafter
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 24


def on_cuda(zoo: Callable[[str], Any], family: str, dtype: torch.dtype) -> Any:
    """An enabled copy of a family's model on the GPU; transformers' own checks of CPU inputs stay quiet."""
    model = hf_specdec.disable(copy.deepcopy(zoo(family))).to("cuda", dtype)
    return hf_specdec.enable(model)


@pytest.mark.parametrize("prompt_device", ["cuda", "cpu"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_speculation_changes_nothing(zoo: Any, family: str, do_sample: bool, prompt_device: str) -> None:
    """Trees with accepted nodes apart, and prompt lookup, give plain `generate`'s tokens seed for seed."""
    model = on_cuda(zoo, family, torch.float32)
    if model.config.is_encoder_decoder and prompt_device == "cpu":
        pytest.skip("plain generate's encoder takes no prompt of another device")
    prompt = PROMPT.to(prompt_device)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    torch.manual_seed(7)
    expected = plain(model, prompt, **settings)
    for method in (lambda: OracleDrafter(expected[0].tolist()), "prompt_lookup"):
        torch.manual_seed(7)
        assert torch.equal(model.generate(prompt, spec_method=method, **settings), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_half_precision_finds_the_tier_of_fp32(zoo: Any, family: str, dtype: torch.dtype) -> None:
    """Rounding neither hides nor invents what a model can do."""
    assert hf_specdec.capability(on_cuda(zoo, family, dtype)).tier == FAMILIES[family].tier


def test_tf32_does_not_hide_what_a_model_can_do(zoo: Any) -> None:
    """TF32 rounds an fp32 model's products to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert hf_specdec.capability(on_cuda(zoo, "llama", torch.float32)).tier == "tree"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_embedded_target_generates_there() -> None:
    """The real model, loaded onto the device in bf16, drafts and accepts."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(
        hf_specdec.embedded.path("target"), precision="bf16", device_map="cuda"
    )
    output = model.generate(
        PROMPT.to("cuda"), max_new_tokens=64, do_sample=False, spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert output.spec_stats.tier == "tree"
    assert output.spec_stats.num_accepted_tokens > 0
