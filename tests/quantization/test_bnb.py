"""What bitsandbytes gets wrong on CPUs is noticed, avoided or refused."""

import copy
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels.quantization import bnb
from tests.helpers.support import plain

load = hf_specdec.AutoModelForCausalLM.from_pretrained
DRAFT = embedded.path("draft")  # its MLP has 344 units, which is no multiple of 64
PROMPT = torch.arange(5, 30)[None]


def four_bit_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}


def unpacked(layer: Any) -> torch.Tensor:
    """A 4-bit weight by the format's definition: codes of a table, times the scale of their block of 64."""
    state = layer.weight.quant_state
    packed = layer.weight.data.view(-1)
    codes = torch.stack([packed >> 4, packed & 0xF], dim=1).view(-1).int()
    numbers = state.code[codes].view(-1, 64) * state.absmax.float().view(-1, 1)
    return numbers.view(layer.out_features, layer.in_features)


def test_split_blocks_are_read_rightly_or_found_out() -> None:
    """What is found for a small weight is what happens to a layer of a model."""
    torch.manual_seed(0)
    scales: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}  # one a block, not quantised again
    layer = bitsandbytes.nn.Linear4bit(96, 32, bias=False, compute_dtype=torch.float32, **scales)
    layer.weight.data = torch.randn(32, 96)
    layer = layer.to("cpu")
    if layer.weight.quant_state is None:
        layer.weight = bitsandbytes.nn.Params4bit(torch.randn(32, 96), **scales).to("cpu")
    result = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.allclose(result.float(), unpacked(layer), atol=1e-2) == bnb.reads_split_blocks()


def test_nf4_weights_are_what_their_codes_say() -> None:
    """Within half the widest step of the table, of the block's largest."""
    model, original = load(DRAFT, precision="nf4"), load(DRAFT, precision="fp32")
    for name, layer in four_bit_layers(model).items():
        weight = original.get_submodule(name).weight
        largest = weight.view(-1, 64).abs().amax(1, keepdim=True)
        error = (unpacked(layer).view(-1, 64) - weight.view(-1, 64)).abs()
        assert (error <= 0.16 * largest).all(), name


def test_what_is_computed_is_what_the_weights_say() -> None:
    """The same model with its weights unpacked into fp32 says nearly the same."""
    model, unpacked_model = load(DRAFT, precision="nf4"), load(DRAFT, precision="fp32")
    for name, layer in four_bit_layers(model).items():
        unpacked_model.get_submodule(name).weight.data = unpacked(layer)
    with torch.no_grad():
        result, expected = model(PROMPT).logits.float(), unpacked_model(PROMPT).logits
    assert (result - expected).abs().max() <= 0.03 * expected.abs().max()


def test_a_checkpoint_with_split_blocks_is_refused_where_it_is_read_wrongly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bnb, "reads_split_blocks", lambda: True)
    load(DRAFT, precision="nf4").save_pretrained(tmp_path)
    assert load(tmp_path)
    monkeypatch.setattr(bnb, "reads_split_blocks", lambda: False)
    with pytest.raises(UnsupportedModelError, match="reads 4-bit rows of 344 numbers wrongly on this CPU"):
        load(tmp_path)


def test_a_saved_nf4_model_loads_again(tmp_path: Path) -> None:
    model = load(DRAFT, precision="nf4")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert plain(again, PROMPT, **settings).tolist() == plain(model, PROMPT, **settings).tolist()


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_an_enabled_model_copies(precision: str) -> None:
    """Before its first forward; the hook that guards the state dict comes along."""
    model = load(DRAFT, precision=precision)
    other = copy.deepcopy(model)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert plain(other, PROMPT, **settings).tolist() == plain(model, PROMPT, **settings).tolist()


@pytest.mark.parametrize(("threshold", "tier"), [(0.5, "plain"), (0.0, "tree")])
def test_int8_outliers_are_named_where_they_are_the_reason_against_drafts(threshold: float, tier: str) -> None:
    """A column with an outlier is multiplied in 16 bits for all tokens of a forward, which fp32 shows."""
    config = tf.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    result = hf_specdec.capability(load(DRAFT, dtype=torch.float32, quantization_config=config))
    assert result.tier == tier
    assert ("llm_int8_threshold=0.0" in result.reason) == (tier == "plain")
