"""Recurrent and convolution states after forwards of several tokens are those of one token at a time."""

from typing import Any

import pytest
import torch
from transformers import JambaForCausalLM

import hf_specdec
from hf_specdec.compat.caches import CACHE, contents
from tests.helpers.support import DRAFTS, PROMPT, plain
from tests.helpers.zoo_wide import build, inputs, shrunk

FORGETFUL = ["falcon_mamba", "jamba", "mamba", "recurrent_gemma", "zamba"]  # of the state, in several tokens
RECORDED = "bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lara_mini lfm2 lfm3".split()
RECORDED += "mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_next zamba2".split()
COPIED = ["minimax", "qwen4_exp", "rwkv", "xlstm", "zaya"]  # their functions have no replacement
OUTPUTS = ("out_proj.weight", "linear_out.weight")  # of layers with states
CALL: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}


def state_errors(cache: Any, wanted: Any) -> list[float]:
    """The difference of each tensor, over its norm."""
    pairs = zip(contents(cache), contents(wanted), strict=True)
    return [float((ours.float() - other.float()).norm() / (other.float().norm() + 1e-9)) for ours, other in pairs]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.at_most(3)
@pytest.mark.parametrize("weight", [0.0, 0.003, 0.1])
@pytest.mark.parametrize("name", FORGETFUL)
def test_states_that_are_forgotten_are_found_however_little_they_weigh(name: str, weight: float) -> None:
    """With a weight of 0 no logit shows them."""
    model = build(shrunk(name), "causal", 0.02)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(OUTPUTS):
                parameter.normal_(std=weight, generator=torch.Generator().manual_seed(0))
    expected = plain(model, **inputs(model, rows=1), **CALL)
    output = hf_specdec.enable(model).generate(**inputs(model, rows=1), **CALL, spec_method="prompt_lookup")
    assert output.spec_stats.tier == "plain"
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert max(state_errors(output[CACHE], expected[CACHE])) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.at_most(6)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", RECORDED + COPIED)
def test_states_come_back_as_plain_generation_leaves_them(name: str, rows: int) -> None:
    model = hf_specdec.enable(build(shrunk(name), "causal", 0.15))
    expected = plain(model, **inputs(model, rows=rows), **CALL)
    draft = DRAFTS["oracle"](expected.sequences[0].tolist()) if rows == 1 else {"spec_method": "prompt_lookup"}
    output = model.generate(**inputs(model, rows=rows), **CALL, **draft)
    of_copied = "plain" if rows > 1 else "chain"
    assert output.spec_stats.tier == ("tree" if name in RECORDED else of_copied)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert rows > 1 or output.spec_stats.num_accepted_tokens > 0
    assert max(state_errors(output[CACHE], expected[CACHE])) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3_next"])
def test_in_bf16_states_are_compared_by_what_rounding_does_to_them(name: str) -> None:
    model = hf_specdec.enable(build(shrunk(name), "causal", 0.15).to(torch.bfloat16))
    assert hf_specdec.capability(model).tier == "tree"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.at_most(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_in_half_precision_a_forgotten_state_is_not_taken_for_rounding(seed: int, dtype: torch.dtype) -> None:
    """Weights as they are initialised: the state is 0.01 to 0.07 of its norm away, by logits nothing is."""
    config = shrunk("jamba")
    config.num_hidden_layers = 2
    torch.manual_seed(seed)
    model = hf_specdec.enable(JambaForCausalLM(config).eval().to(dtype))
    assert hf_specdec.capability(model).tier == "plain"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_forgotten_state_of_small_numbers_is_found(dtype: torch.dtype) -> None:
    """Norms that add 1 to the variance: the state's norm is 1e-8."""
    config = shrunk("jamba")
    config.num_hidden_layers, config.rms_norm_eps = 2, 1.0
    torch.manual_seed(0)
    model = hf_specdec.enable(JambaForCausalLM(config).eval().to(dtype))
    assert hf_specdec.capability(model).tier == "plain"


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_several_tokens_change_more_is_found_though_no_logit_shows_it() -> None:
    """A layer whose output is not read, of a model that keeps its states otherwise."""
    model = build(shrunk("qwen3_next"), "causal", 0.15)
    layer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    with torch.no_grad():
        layer.out_proj.weight.zero_()

    def change(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("cache_params") or kwargs.get(CACHE)
        if kwargs["hidden_states"].shape[1] > 1:
            cache.layers[module.layer_idx].recurrent_states[0].mul_(1.001)

    layer.register_forward_hook(change, with_kwargs=True)
    result = hf_specdec.capability(hf_specdec.enable(model))
    assert (result.tier, "states in the cache differ by 0.001" in result.reason) == ("plain", True)


def test_a_text_goes_on_where_the_first_call_is_its_second_turn() -> None:
    """RecurrentGemma's layers keep their states themselves."""
    model = build(shrunk("recurrent_gemma"), "causal", 0.3)
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}

    def begun() -> Any:
        return plain(model, PROMPT, **call, return_dict_in_generate=True)

    first = begun()
    text = torch.cat([first.sequences, PROMPT[:, :4]], dim=1)
    expected = plain(model, text, **call, **{CACHE: first[CACHE]}).tolist()
    again = begun()
    hf_specdec.enable(model)
    assert model.generate(text, **call, **{CACHE: again[CACHE]}, spec_method="prompt_lookup").tolist() == expected
