"""FP8 weights made while a checkpoint is read, a tensor at a time, and read again where this package saved them.

What is saved is the compressed-tensors format with one scale a row (`float-quantized`, strategy `channel`), which other
tools read; a loader that does not know it refuses, and never takes the codes for weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.compat import weights as compat
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.kernels.quantization.e4m3 import quantize_rows
from hf_specdec.kernels.quantization.fp8_linear import Fp8Linear

METHOD = "hf_specdec_fp8"  # transformers' name for it while a model is loaded; never written into a checkpoint
ROUTERS = ("gate", "router", "shared_expert_gate")  # small layers that choose experts, by their last name
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
LAYERS = (nn.Linear, compat.Conv1D)


class Fp8Config(compat.QuantizationConfigMixin):
    """Configuration of FP8 weights.

    Attributes:
        left (`dict[str, str]`): linear layers that were left as they are, with the reason.
        transposed (`list[str]`): layers that were GPT-2's `Conv1D` and are ordinary ones now.
    """

    def __init__(self, ignore: list[str] | None = None, quant_method: str = METHOD) -> None:
        self.quant_method = quant_method
        self.ignore = ignore
        self.left: dict[str, str] = {}
        self.transposed: list[str] = []

    def to_dict(self) -> dict[str, Any]:
        """Entry of config.json: the compressed-tensors format."""
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(SCHEME), "input_activations": None}},
            "ignore": sorted(self.left),
        }


class Fp8Quantizer(compat.HfQuantizer):
    """Puts `Fp8Linear` into a model's skeleton and fills it from a checkpoint of any dtype, or one that was saved."""

    requires_calibration = False
    quantization_config: Fp8Config

    @property
    def quantized_element_size(self) -> float:
        """Bytes of a quantised weight, for the placement's estimates."""
        return 1

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Returns whether a tensor of the checkpoint becomes codes and scales."""
        path, _, name = param_name.rpartition(".")
        return name == "weight" and not self.pre_quantized and isinstance(model.get_submodule(path), Fp8Linear)

    def get_quantize_ops(self) -> compat.ConversionOps:
        """The operation on one weight."""
        return _Quantize(self.quantization_config.transposed)

    def is_serializable(self) -> bool:
        """Saving is refused, where it is, by `get_state_dict_and_metadata`, which can say why."""
        return True

    @property
    def is_trainable(self) -> bool:
        """FP8 weights have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The layers are plain torch operations."""
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, Any]]:
        """Refuse to save what the format has no name for.

        Raises:
            UnsupportedModelError: the model has GPT-2's transposed layers.
        """
        if self.quantization_config.transposed:
            raise UnsupportedModelError(
                f"`save_pretrained` has no FP8 format for the transposed layers (Conv1D) of {type(model).__name__}. "
                'Save the model in "bf16", and load it with precision="fp8" each time.'
            )
        return None, {}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        layers = {name: module for name, module in model.named_modules() if type(module) in LAYERS}
        left = reasons_to_leave(model, layers) if config.ignore is None else dict.fromkeys(config.ignore, "saved so")
        for name, layer in layers.items():
            if name not in left:
                model.set_submodule(name, _empty_like(layer))
                config.transposed += [name] if isinstance(layer, compat.Conv1D) else []
        config.left = left
        if len(left) == len(layers):
            raise UnsupportedModelError(
                f'precision="fp8" needs linear layers, but {type(model).__name__} has none besides its output layer. '
                'Load it with "bf16".'
            )
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                module.requires_grad_(False)
                module.only_normal = None if self.pre_quantized else True  # `quantize_rows` makes no subnormal codes
        return model


class _Quantize(compat.ConversionOps):
    """One weight of a checkpoint to codes and scales."""

    def __init__(self, transposed: list[str]) -> None:
        self.transposed = transposed

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """`{"layer.weight": tensor}` to `{"layer.weight": codes, "layer.weight_scale": scales}`."""
        made: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            if name.removesuffix(".weight") in self.transposed:
                weight = weight.t()
            codes, scale = quantize_rows(weight)
            made[name] = nn.Parameter(codes, requires_grad=False)
            made[f"{name}_scale"] = nn.Parameter(scale, requires_grad=False)
        return made


def fp8_config() -> Fp8Config:
    """The configuration for loading, known to transformers from here on."""
    compat.register(METHOD, Fp8Config, Fp8Quantizer)
    return Fp8Config()


def check_offloading(model: PreTrainedModel) -> None:
    """Refuse FP8 weights on the disk that were not read from there.

    Raises:
        ConfigError: transformers would read the checkpoint's own weights as codes.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    places = getattr(model, "hf_device_map", None) or {}
    if isinstance(quantizer, Fp8Quantizer) and not quantizer.pre_quantized and "disk" in places.values():
        rule = "must not put FP8 weights on the disk while they are made"
        remedy = "Load without it, call save_pretrained, and load what that wrote; or give max_memory more."
        raise ConfigError("device_map", rule, {k: v for k, v in places.items() if v == "disk"}, remedy)


def saved_here(saved: Mapping[str, Any] | None) -> bool:
    """Returns whether a checkpoint's `quantization_config` is what `Fp8Config` writes, names of layers aside."""
    if saved is None or saved.get("quant_method") != "compressed-tensors":
        return False
    expected = Fp8Config().to_dict()
    return all(saved.get(name) == value for name, value in expected.items() if name != "ignore")


def reasons_to_leave(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Linear layers that stay as they are, with the reason."""
    tied, full = compat.tied_names(model), compat.keep_in_full_precision(model)
    reasons: dict[str, str] = {}
    for name in layers:
        if f"{name}.weight" in tied:
            reasons[name] = "its weight is another layer's too"
        elif name.rpartition(".")[2] in ROUTERS:
            reasons[name] = "it chooses experts"
        elif any(f".{part}." in f".{name}.weight." for part in full):
            reasons[name] = "its author keeps it in full precision"
    return reasons


def _empty_like(layer: Any) -> Fp8Linear:
    weight = layer.weight
    out_size, in_size = weight.shape[::-1] if isinstance(layer, compat.Conv1D) else weight.shape
    has_bias = layer.bias is not None
    return Fp8Linear(in_size, out_size, bias=has_bias, dtype=weight.dtype, device=weight.device)
