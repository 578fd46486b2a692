"""Private or moving names of transformers and torch that attention functions need, each with its reason.

Names                              Why
`sdpa_attention_forward`           what is computed in another way here, unless somebody registers another function
`eager_attention_forward`          of a model's own file: what soft-capping and attention sinks mean for that model; the
                                   core takes its place in this package's forwards
`_can_set_attn_implementation`, `_supports_sdpa`, `_supports_attention_backend`
                                   models with attention code of their own take a foreign mask for theirs
`Tensor._version`                  tells a mask that was changed in place from the one that something was made of
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_attention_forward

from hf_specdec.compat.generation import has_own_cache
from hf_specdec.compat.masks import mask_function_of
from hf_specdec.compat.modules import modules_of

EAGER = "eager_attention_forward"
# transformers' own functions that make something else than a 4-D tensor, under the names they are registered with.
MASKS_OF_OTHER_KINDS = ("flash_attention_2", "flex_attention")


def attention_function_of(implementation: str) -> Callable[..., Any] | None:
    """The attention function that is registered under a name, or `None`; `"eager"` stands for each model's own."""
    return cast("Callable[..., Any] | None", AttentionInterface().get(implementation))


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Offer an attention function to all models."""
    AttentionInterface.register(name, function)


def takes_tensor_masks(implementation: str | None) -> bool:
    """Returns whether an attention implementation is given its mask as a 4-D tensor, which may hide anything.

    FlashAttention's has two dimensions and flex's is compiled; where no mask is made, there is none to be changed.
    """
    make = mask_function_of(implementation)
    return make is not None and make not in map(mask_function_of, MASKS_OF_OTHER_KINDS)


def can_set_attention(model: PreTrainedModel) -> bool:
    """True if all of the model's attention asks transformers' interface for its function, and masks all of its keys.

    The first flag is true where any of it asks: a part with code of its own may be left. A model that torch's attention
    is not offered for, and that keeps more than keys and values, extends masks of its own kind only.
    """
    cls: Any = type(model)
    by_interface = cls._supports_sdpa or (cls._supports_attention_backend and not has_own_cache(model))
    return bool(cls._can_set_attn_implementation() and by_interface)


def asks_for_attention(model: PreTrainedModel) -> bool:
    """True if the model's attention asks transformers' interface for its function, any part of it."""
    return bool(model._supports_attention_backend)


def eager_attention_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The plain attention function of the file that defines the module, or `None` where it has none of that name."""
    return cast("Callable[..., Any] | None", _file_of(type(module)).get(EAGER))


def files_with_eager_attention(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The namespaces of the files that define the model's modules and have such a function, under `EAGER`."""
    files = {id(file): file for cls in set(map(type, modules_of(model))) if EAGER in (file := _file_of(cls))}
    return list(files.values())


def _file_of(cls: type) -> dict[str, Any]:
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return getattr(forward, "__globals__", {})


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that changes with every change in place, or `None` where torch does not count them."""
    return None if tensor.is_inference() else tensor._version
