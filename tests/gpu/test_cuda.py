"""On a CUDA device: the same tokens as plain `generate` in fp32, wherever inputs and model lie. Run with -m gpu."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.devices import SAMPLING, STATIC, moved
from tests.helpers.drafts import OracleDrafter
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES
from tests.matrix.test_devices import (  # noqa: F401 which run here too
    test_a_head_changes_nothing,
    test_a_sampled_row_is_its_prompt_alone,
    test_each_row_is_plain_generates,
    test_many_prompts_are_each_alone,
)
from tests.matrix.test_many import PROMPTS

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


CUDA = torch.device("cuda")


@pytest.fixture
def place() -> torch.device:
    """Where the imported tests have their models."""
    return CUDA


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_what_the_nodes_lead_to_is_what_each_token_leads_to(zoo: Any, method: str, sampling: str) -> None:
    """All nodes' processors and draws at once; the device's generator ends where plain sampling leaves it."""
    model, prompt = moved(zoo("llama"), CUDA), PROMPT.to(CUDA)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, **SAMPLING[sampling]}
    torch.manual_seed(4)
    expected, after = plain(model, prompt, **options), torch.cuda.get_rng_state()
    torch.manual_seed(4)
    output = model.generate(prompt, spec_method=method, return_dict_in_generate=True, **options)
    assert output.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert output.spec_stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_gives_the_same_tokens(zoo: Any, family: str) -> None:
    model = moved(zoo(family), CUDA)
    prompt = torch.tensor(PROMPTS[:1], device=CUDA)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = plain(model, prompt, **options)
    for method in ("prompt_lookup", "lookahead"):
        output = model.generate(prompt, cache_implementation="static", spec_method=method, **options)
        assert output.tolist() == expected.tolist()
