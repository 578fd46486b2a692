"""Operators of torch as a dispatch mode sees them, and the storages of tensors; all by torch's private names."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

TO_COPY = torch.ops.aten._to_copy.default  # what `tensor.to` calls
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What reads numbers of a tensor into Python: another call may do something else.
READING = frozenset({"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "unique", "_unique2"})


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator.

    Attributes:
        name (`str`): without its namespace and overload.
        decides (`bool`): whether numbers of a tensor, or random ones, decide what happens next.
        is_empty (`bool`): whether its result holds nothing yet.
        is_constant (`bool`): whether its result is what it was given.
        changes (`bool`): whether it writes into its arguments.
    """

    name: str
    decides: bool
    is_empty: bool
    is_constant: bool
    changes: bool


def operator_of(function: Any) -> Operator:
    """Properties of an operator that a dispatch mode sees."""
    schema = function._schema
    name = schema.name.partition("::")[2].partition(".")[0]
    decides = name in READING or torch.Tag.nondeterministic_seeded in function.tags
    return Operator(name, decides, name in EMPTY, name == "lift_fresh", schema.is_mutable)


def storage_of(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor as long as it lives."""
    return int(tensor.untyped_storage()._cdata)
