"""Devices and processes over which a model's weights and inputs are placed.

Names                              Why
`_hf_hook`, `hf_device_map`        accelerate's hooks bring weights and inputs together
`torch._dynamo.mark_static_address`
                                   CUDA graphs skip forwards that write into buffers without it, as `StaticCache` knows
`torch._dynamo.maybe_mark_dynamic`
                                   one graph serves all widths; `mark_dynamic` raises where a model allows one alone
`_is_mkldnn_bf16_supported`, `_is_mkldnn_fp16_supported`, `_is_amx_tile_supported`
                                   torch has no public name for whether a CPU computes in halves, or tiles of them
`_device_mesh`                     over which processes a tensor-parallel model's weights are shared out
`_no_split_modules`                parts that accelerate must not tear apart
`DistributedConfig`                `from_pretrained` takes `tp_plan` in it only
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_specdec.compat.models import input_embeddings
from hf_specdec.compat.modules import modules_of

# The time of a forward over that of its computation where all weights are brought in for it: on a CPU 1.8 to 4.3 were
# measured, with files in the page cache; a PCIe bus is slower than an accelerator's memory by more than this.
LOADING = {"cpu": 3.0}
LOADING_TO_ACCELERATOR = 30.0


def is_dispatched(model: PreTrainedModel) -> bool:
    """Returns whether accelerate's hooks move what goes through the model: it is spread over devices, or offloaded."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return len(places) > 1 or any("_hf_hook" in vars(module) for module in modules_of(model))


def load_factor(model: PreTrainedModel) -> float:
    """Rough ratio of a forward's time to its computation's: accelerate loads offloaded weights."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if places.isdisjoint(("cpu", "disk")) and "_hf_hook" not in vars(model):  # which offloading without a map sets
        return 1.0
    sizes: dict[bool, int] = {False: 0, True: 0}
    for weight in model.parameters():
        sizes[weight.device.type == "meta"] += weight.numel()
    loading = LOADING.get(input_device(model).type, LOADING_TO_ACCELERATOR)
    return 1.0 + (loading - 1.0) * sizes[True] / max(sum(sizes.values()), 1)


def input_device(model: PreTrainedModel) -> torch.device:
    """Device of a model's inputs; the embeddings' execution device under accelerate's offloading."""
    moved_to = execution_device(model) or execution_device(input_embeddings(model))
    device: torch.device = model.device
    return moved_to or device


def execution_device(module: Any) -> torch.device | None:
    """Device to which accelerate's hook moves a module's weights for the forward; `None` without a hook."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


def computes_halves(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN multiplies matrices of fp16, or of bf16, on this CPU; else torch converts each number."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    onednn = torch.ops.mkldnn
    is_fp16 = dtype == torch.float16  # quantised weights are multiplied as bf16
    return bool(onednn._is_mkldnn_fp16_supported() if is_fp16 else onednn._is_mkldnn_bf16_supported())


def has_tiles() -> bool:
    """Returns whether this CPU multiplies tiles of bf16 by one instruction (AMX), as oneDNN does then."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(is_supported is not None and is_supported())


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell compiled forwards that the tensor stays where it is, so that CUDA graphs may write into it."""
    torch._dynamo.mark_static_address(tensor)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell compiled forwards that this dimension changes, where the function does not depend on one size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def device_mesh(model: PreTrainedModel) -> Any:
    """The mesh of devices over which transformers has shared out the model's weights, or `None`."""
    return getattr(model, "_device_mesh", None)


def is_shared(model: PreTrainedModel) -> bool:
    """True if several processes hold parts of the model's weights, so that its forwards are collectives."""
    mesh = device_mesh(model)
    return mesh is not None and mesh.size() > 1


def tensor_parallel_arguments(plan: dict[str, Any]) -> dict[str, Any]:
    """`tp_plan` and `tp_size` as `from_pretrained` takes them."""
    return {"distributed_config": DistributedConfig(**plan)}


def unsplittable_modules(model: PreTrainedModel) -> list[str]:
    """Classes of modules that must lie on one device."""
    return list(model._no_split_modules or ())
