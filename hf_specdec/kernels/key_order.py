"""Attention in the order of the text on GPUs: the order of keys takes a mask's place on its way through the model.

What reads it as a mask fails by its dtype.
"""

from importlib.util import find_spec
from typing import Any

import torch

from hf_specdec.errors import UnsupportedModelError

DEVICES = ("cuda",)
# Arguments that change the result and that only transformers' function knows.
FOREIGN = ("position_bias", "cache", "softcap")


def why_unordered(device: torch.device) -> str | None:
    """Reason why there is no such attention on a device; `None` where there is."""
    if device.type not in DEVICES:
        return f"on {device.type} a kernel is chosen by the number of tokens"
    return None if find_spec("triton") else "without Triton a kernel is chosen by the number of tokens"


def is_key_order(mask: torch.Tensor) -> bool:
    """Returns whether it is the order of keys that `in_order` has put in a mask's place."""
    return mask.dtype == torch.int32


def in_order(masks: Any) -> Any:
    """The order of keys for a mask `(B, 1, M, K)`, or for each of a dictionary."""
    from hf_specdec.kernels import text_order  # which needs Triton

    if isinstance(masks, dict):
        return {kind: in_order(mask) for kind, mask in masks.items()}
    return text_order.key_order(masks)


def attended_in_order(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys: `(B, M, Hq, Dv)`.

    Args:
        kwargs: what else a model asks of its attention.

    Raises:
        UnsupportedModelError: it asks for more than scaled scores, or has changed the order.
    """
    from hf_specdec.kernels import text_order

    others = [name for name in FOREIGN if kwargs.get(name) is not None] + ["dropout"] * bool(kwargs.get("dropout"))
    shape = (query.shape[0], 1, query.shape[2], key.shape[2] + text_order.NOTES)
    if others or order.shape != shape or query.shape[1] % key.shape[1]:
        what = others[0] if others else "masks of its own"
        raise UnsupportedModelError(f"its attention has {what}. Use plain_kernels=False of enable.")
    found: torch.Tensor = text_order.attend_in_order(
        query, key, value, order, query.shape[-1] ** -0.5 if scaling is None else scaling
    )
    return found
