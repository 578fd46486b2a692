"""Private or moving names of transformers that placement needs, each with its reason.

Names                              Why
`_device_mesh`                     over which processes a tensor-parallel model's weights are shared out
`_no_split_modules`                parts that accelerate must not tear apart
`DistributedConfig`                `from_pretrained` takes `tp_plan` in it only
"""

from typing import Any

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig


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
