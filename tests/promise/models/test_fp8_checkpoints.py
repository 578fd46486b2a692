"""Ready FP8 checkpoints as transformers loads them, and models on several devices: speculation gives plain's tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.support import PROMPT, computed_by_torch, plain

CODES, MAX_CODE = torch.float8_e4m3fn, 448.0
load = hf_specdec.AutoModelForCausalLM.from_pretrained
SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
METHODS: list[dict[str, Any]] = [
    {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    {"spec_method": "lookahead"},
    {"spec_method": "plain"},
]


def block_scaled(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`quant_method: fp8` with blocks of 128 by 128; the sizes here fill them."""
    rows, columns = weight.shape[0] // 128, weight.shape[1] // 128
    blocks = weight.float().view(rows, 128, columns, 128)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / MAX_CODE
    codes = (blocks / scale).to(CODES).view(weight.shape)
    return {"weight": codes, "weight_scale_inv": scale.view(rows, columns)}


def row_scaled(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax(dim=1, keepdim=True) / MAX_CODE
    return {"weight": (weight.float() / scale).to(CODES), "weight_scale": scale.to(torch.bfloat16)}


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "fp8 checkpoint": (
        block_scaled,
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "compressed-tensors checkpoint": (
        row_scaled,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": TOKENS}},
            "ignore": ["lm_head"],
        },
    ),
}


def llama() -> Any:
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = tf.LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.15, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(3)
    return tf.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The format's name, and the folder of a tiny model in it."""
    make, quantization_config = FORMATS[request.param]
    llama().save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in make(tensor).items()}
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    content = json.loads((tmp_path / "config.json").read_text("utf-8"))
    content["quantization_config"] = quantization_config
    (tmp_path / "config.json").write_text(json.dumps(content), "utf-8")
    return request.param, str(tmp_path)


@pytest.mark.at_most(1)
def test_it_speculates_in_fp32(checkpoint: tuple[str, str]) -> None:
    """Widened while it is read, and nothing of the format is left."""
    model = load(checkpoint[1], precision="fp32")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    original = llama().model.layers[0].mlp.up_proj.weight.float()
    error = (model.model.layers[0].mlp.up_proj.weight - original).abs().max()
    assert 0 < error <= original.abs().max() / 16
    expected = plain(model, PROMPT, **SETTINGS)
    for how in METHODS:
        assert model.generate(PROMPT, **SETTINGS, **how).tolist() == expected.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("precision", [None, "auto", "bf16"])
def test_it_loads_as_transformers_loads_it_and_speculates(checkpoint: tuple[str, str], precision: str | None) -> None:
    model = load(checkpoint[1], precision=precision)
    expected = plain(model, PROMPT, **SETTINGS)
    reference = tf.AutoModelForCausalLM.from_pretrained(checkpoint[1])
    if precision != "bf16":
        assert expected.tolist() == plain(reference, PROMPT, **SETTINGS).tolist()
    for how in METHODS:
        output = model.generate(PROMPT, **SETTINGS, **how, return_dict_in_generate=True)
        assert output.spec_stats.tier == "tree"
        assert output.sequences.shape == expected.shape
    with computed_by_torch():
        assert model.generate(PROMPT, **SETTINGS, spec_method="plain").tolist() == expected.tolist()


def test_another_quantised_precision_is_refused(checkpoint: tuple[str, str]) -> None:
    """FP8 of another kind too: nothing here keeps blocks of 128 or rounds activations."""
    name, path = checkpoint
    for precision in ("fp8", "int8", "nf4"):
        with pytest.raises(ConfigError, match=f"'auto', 'fp32', 'bf16', 'fp16' for this .* whose weights are {name}"):
            load(path, precision=precision)


def spread(place: str) -> dict[str, str]:
    """A part on the CPU, and a layer and the output layer elsewhere."""
    here = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    return dict.fromkeys(here, "cpu") | {"model.layers.1": place, "lm_head": place}


def test_fp8_weights_on_the_disk_are_refused(tmp_path: Path) -> None:
    """transformers would put the checkpoint's own weights there in their place."""
    llama().save_pretrained(tmp_path / "bf16")
    offload = {"device_map": spread("disk"), "offload_folder": str(tmp_path / "offload")}
    with pytest.raises(ConfigError, match="must not put weights on the disk that are quantised"):
        load(tmp_path / "bf16", precision="fp8", **offload)
