"""Packed weights while transformers loads a model: quantised to 8 bits tensor by tensor, or read from packed ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.compat import loading as compat
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels.packed import Q8_0, Format, Packed, PackedEmbedding, PackedLinear, quantized

METHOD = "hf_specdec_packed"  # transformers' name for it while a model is loaded; never written into a checkpoint
ROUTERS = ("gate", "router", "shared_expert_gate")  # small layers that choose experts, by their last name
LINEAR = (nn.Linear, compat.Conv1D)


class PackedConfig(compat.QuantizationConfigMixin):
    """Configuration of packed weights.

    Attributes:
        kinds (`Mapping[str, Format]`, *optional*): modules whose weights the state dict has packed, and how; `None` for
            weights that become Q8_0 while they are read.
        transposed (`list[str]`): layers that were GPT-2's `Conv1D` and are ordinary ones now.
    """

    def __init__(self, kinds: Mapping[str, Format] | None = None, quant_method: str = METHOD) -> None:
        self.quant_method = quant_method
        self.kinds = kinds
        self.transposed: list[str] = []

    def to_dict(self) -> dict[str, Any]:
        """Describes it in a log."""
        return {"quant_method": self.quant_method}


class PackedQuantizer(compat.HfQuantizer):
    """Puts packed modules into a model's skeleton and fills them."""

    requires_calibration = False
    quantization_config: PackedConfig

    @property
    def quantized_element_size(self) -> float:
        """Bytes of a quantised weight, for the placement's estimates."""
        return Q8_0.block_bytes / Q8_0.columns

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Returns whether a tensor of the checkpoint becomes a packed one."""
        path, _, name = param_name.rpartition(".")
        is_float = self.quantization_config.kinds is None
        return is_float and name == "weight" and isinstance(model.get_submodule(path), Packed)

    def get_quantize_ops(self) -> compat.ConversionOps:
        """The operation on one weight."""
        return _Quantize(self.quantization_config.transposed)

    def is_serializable(self) -> bool:
        """Saving is refused by `get_state_dict_and_metadata`, which can say why."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The layers are computed by the core."""
        return False

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, Any]]:
        """Refuse to save.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"`save_pretrained` has no format for the packed weights of {type(model).__name__}. Keep the checkpoint "
            'that it was loaded from, or load that in "bf16" and save it.'
        )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        kinds = dict.fromkeys(packable(model), Q8_0) if config.kinds is None else config.kinds
        if not kinds:
            raise UnsupportedModelError(
                f'precision="int8" needs linear layers, but {type(model).__name__} has none. Load it with "bf16".'
            )
        for name, kind in kinds.items():
            module = model.get_submodule(name)
            model.set_submodule(name, packed_module(module, kind))
            config.transposed += [name] if isinstance(module, compat.Conv1D) else []
        return model


class _Quantize(compat.ConversionOps):
    """One weight of a checkpoint to a packed one."""

    def __init__(self, transposed: list[str]) -> None:
        self.transposed = transposed

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """`{"layer.weight": tensor}` to the same with a packed weight."""
        made: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            weight = weight.t() if name.removesuffix(".weight") in self.transposed else weight
            made[name] = nn.Parameter(quantized(weight), requires_grad=False)
        return made


def packed_config(kinds: Mapping[str, Format] | None = None) -> PackedConfig:
    """The configuration for loading, known to transformers from here on."""
    compat.register(METHOD, PackedConfig, PackedQuantizer)
    return PackedConfig(kinds)


def packed_module(module: Any, kind: Format) -> Packed:
    """The empty packed module in place of a linear layer or an embedding."""
    weight = module.weight
    if isinstance(module, nn.Embedding):
        scale = compat.embedding_scale(module, weight.dtype)
        return PackedEmbedding(
            len(weight), weight.shape[1], kind, dtype=weight.dtype, scale=scale, device=weight.device
        )
    num_out, num_in = reversed(weight.shape) if isinstance(module, compat.Conv1D) else weight.shape
    has_bias = module.bias is not None
    return PackedLinear(num_in, num_out, kind, bias=has_bias, dtype=weight.dtype, device=weight.device)


def packable(model: PreTrainedModel) -> list[str]:
    """Names of modules whose weights can be packed: linear layers, and input embeddings with what shares their weight.

    Left out are layers that choose experts, what the model's author keeps in fp32, and weights of which a module that
    is neither has a share.
    """
    modules, full = dict(model.named_modules(remove_duplicate=False)), compat.keep_in_full_precision(model)
    embeddings = model.get_input_embeddings()
    names = [
        name
        for name, module in modules.items()
        if (type(module) in LINEAR or (module is embeddings and compat.is_embedding(module)))
        and name.rpartition(".")[2] not in ROUTERS
        and not any(f".{part}." in f".{name}.weight." for part in full)
    ]
    tied = {key.removesuffix(".weight") for key in compat.tied_names(model) if key.endswith(".weight")}
    shared = [modules.get(name) for name in tied]
    can_share = all(type(module) is nn.Linear or compat.is_embedding(module) for module in shared)
    if compat.reads_output_dtype(model):
        can_share, tied = False, tied | {name for name in names if modules[name] is model.get_output_embeddings()}
    return [name for name in names if name not in tied] + (sorted(tied) if can_share else [])
