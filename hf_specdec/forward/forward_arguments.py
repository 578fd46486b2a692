"""Rows and tensors of a forward's arguments, whatever a model calls them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_specdec.common.transfer import HOST
from hf_specdec.compat.generation import ModelOutput
from hf_specdec.compat.models import OF_PROMPTS

SHORTENED_LOGITS = ("logits_to_keep", "num_logits_to_keep")  # some models ask for the last row only
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def with_token_types(kwargs: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The arguments with the last token's type for each of `width` tokens."""
    types = {name: kwargs[name] for name in TOKEN_TYPES if kwargs.get(name) is not None}
    return {
        **kwargs,
        **{name: types_of[..., -1:].expand(*types_of.shape[:-1], width) for name, types_of in types.items()},
    }


def rows_of(kwargs: dict[str, Any], rows: Sequence[int], batch: int) -> dict[str, Any]:
    """`rows` of everything in a forward's arguments that has one entry for each of `batch` rows."""
    index = torch.tensor(rows, device=HOST)
    return {
        name: rows_of_value(value, index, batch, -2 if name.endswith("position_ids") else 0)
        for name, value in kwargs.items()
    }


def tensors_of(kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a forward's arguments and inside of dictionaries and sequences there, each with its path."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, list | tuple):
            tensors |= tensors_of({f"{name}.{i}": item for i, item in enumerate(value)})
        elif isinstance(value, Mapping):
            tensors |= tensors_of({f"{name}.{inner}": item for inner, item in value.items()})
    return tensors


def rows_of_value(value: Any, index: torch.Tensor, batch: int, dim: int) -> Any:
    """The rows `index` of a tensor whose dimension `dim` is the batch, or of all those in an output or a tuple."""
    if isinstance(value, torch.Tensor):
        is_batched = value.ndim >= max(-dim, dim + 1) and value.shape[dim] == batch
        return value.index_select(dim, index.to(value.device)) if is_batched else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: rows_of_value(item, index, batch, dim) for name, item in value.items()})
    if type(value) is tuple:  # what an encoder returns without a dictionary
        return tuple(rows_of_value(item, index, batch, dim) for item in value)
    return value


def without_prompts(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward without those that leave out logits, or belong to a prompt alone."""
    return {name: value for name, value in inputs.items() if name not in (*SHORTENED_LOGITS, *OF_PROMPTS)}
