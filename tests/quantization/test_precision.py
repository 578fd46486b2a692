"""What is asked of transformers for a precision, and what is refused with its remedy before anything is loaded."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.kernels.quantization.precision import PRECISIONS, loading_arguments, machine_support

TARGET = embedded.path("target")
load = hf_specdec.AutoModelForCausalLM.from_pretrained


def saved_as(folder: Path, quantization_config: dict[str, Any]) -> str:
    """A folder that says its weights are quantised; nothing reads them."""
    content = json.loads((Path(TARGET) / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": quantization_config}))
    return str(folder)


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if a package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "auto"])
def test_every_precision_but_auto_is_listed_for_the_machine(precision: str) -> None:
    (support,) = [result for result in machine_support() if result.precision == precision]
    assert support.works
    assert support.reason


@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "quantization_config"])
def test_precision_and_another_name_for_it_exclude_one_another(name: str) -> None:
    with pytest.raises(ConfigError, match="must be unset with precision") as caught:
        load(TARGET, precision="fp8", **{name: torch.float32})
    assert caught.value.field == name


def test_an_unknown_precision_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fp8'"):
        load(TARGET, precision="fp9")


@pytest.mark.parametrize("precision", ["fp8", "int8", "nf4"])
@pytest.mark.parametrize("name", ["tp_plan", "tp_size", "distributed_config"])
def test_tensor_parallelism_with_quantised_weights_is_refused(name: str, precision: str) -> None:
    """As a precision, as a configuration, and as a checkpoint's own."""
    with pytest.raises(ConfigError, match="quantised weights, which are not sharded") as caught:
        load(TARGET, precision=precision, **{name: "auto"})
    assert caught.value.field == name
    assert "bf16" in caught.value.remedy
    with pytest.raises(ConfigError, match="not sharded"):
        load(TARGET, quantization_config=tf.BitsAndBytesConfig(load_in_8bit=True), **{name: "auto"})


def test_tensor_parallelism_with_a_device_map_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be unset with tp_plan") as caught:
        load(TARGET, tp_plan="auto", device_map="auto")
    assert caught.value.field == "device_map"


@pytest.mark.parametrize(("precision", "extra"), [("fp8", "fp8"), ("nf4", "bnb")])
def test_a_missing_package_is_an_error_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch, precision: str, extra: str
) -> None:
    package = "torchao" if precision == "fp8" else "bitsandbytes"
    without(monkeypatch, package)
    with pytest.raises(MissingExtraError, match=rf'pip install "hf_specdec\[{extra}\]"'):
        load(TARGET, precision=precision)
    assert [support.reason for support in machine_support() if support.precision == precision] == [
        f'{package} is missing: pip install "hf_specdec[{extra}]"'
    ]


@pytest.mark.parametrize(("capability", "activations"), [((8, 0), None), ((8, 9), "rounded"), ((12, 0), "rounded")])
def test_fp8_rounds_activations_where_the_device_multiplies_fp8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], activations: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("hf_specdec.kernels.quantization.precision.default_device", lambda: torch.device("cuda", 0))
    for options, rounds in (({}, activations is not None), ({"device_map": "cpu"}, False)):
        config = loading_arguments("fp8", TARGET, options)["quantization_config"].quant_type
        assert ("DynamicActivation" in type(config).__name__) == rounds


def test_a_checkpoint_that_needs_a_missing_package_is_an_error_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without(monkeypatch, "compressed_tensors")
    path = saved_as(tmp_path, {"quant_method": "compressed-tensors", "format": "int-quantized"})
    with pytest.raises(MissingExtraError, match=r"hf_specdec\[fp8\]"):
        load(path)


QUANTISED = {
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "gptq checkpoint": {"quant_method": "gptq", "bits": 4},
    "fp8 checkpoint": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8", "nf4"])
def test_a_quantised_checkpoint_allows_its_own_precision_only(tmp_path: Path, name: str, precision: str) -> None:
    """And those that transformers widens while it reads them; the error lists them."""
    path = saved_as(tmp_path, QUANTISED[name])
    if precision == name or (name == "fp8 checkpoint" and precision == "bf16"):
        assert loading_arguments(precision, path, {})
        return
    with pytest.raises(ConfigError, match=f"for this checkpoint, whose weights are {name}") as caught:
        loading_arguments(precision, path, {})
    assert "'auto'" in caught.value.rule
    assert (f"{name!r}" in caught.value.rule) == (name in PRECISIONS)


def test_auto_and_nothing_leave_a_quantised_checkpoint_to_transformers(tmp_path: Path) -> None:
    path = saved_as(tmp_path, QUANTISED["nf4"])
    assert loading_arguments(None, path, {"device_map": "cpu"}) == {"device_map": "cpu"}
    assert loading_arguments("auto", path, {}) == {"dtype": "auto"}
