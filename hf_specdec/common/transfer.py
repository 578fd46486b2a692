"""Small arrays from the host to a device, all of them by one copy: each copy would be a launch of its own.

Where the device allows it, the host does not wait for a copy either.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

Array = npt.NDArray[Any]
HostArrays = tuple[list[Array], list[torch.dtype | None]]  # arrays, and what the bits of each mean
HOST = torch.device("cpu")  # named wherever a tensor is made there: users may set another default device
STAGED = {"cuda"}
ALIGNMENT = 16  # bytes; every tensor of the block begins at a multiple


def is_host(device: torch.device) -> bool:
    """Returns whether the host reads what is on `device` without a transfer that waits for all work before it."""
    return device.type == HOST.type


def is_staged(device: torch.device) -> bool:
    """Returns whether a copy to `device` that the host does not wait for has read the host's memory when it returns.

    CUDA copies pageable memory aside first; of other devices nothing of the kind is promised.
    """
    return device.type in STAGED


def upload(tensor: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """A CPU tensor's values on `device`, where possible without waiting for what was launched there before.

    Args:
        into: of the same shape on `device`, to be written over.
    """
    is_staging = is_staged(device)
    return tensor.to(device, non_blocking=is_staging) if into is None else into.copy_(tensor, non_blocking=is_staging)


class SentArrays:
    """Arrays of given shapes on the host and, as tensors, on a device that is not the host's.

    Args:
        arrays: of these shapes.
        dtypes: what the bits of an array mean, where that is not its own type.
    """

    def __init__(
        self, arrays: Sequence[Array], device: torch.device, dtypes: Sequence[torch.dtype | None] = ()
    ) -> None:
        self._device, ends = device, [0]
        for array in arrays:
            ends.append(ends[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
        memory = np.zeros(ends[-1], dtype=np.uint8)
        self._host, self._block = torch.from_numpy(memory), torch.empty(ends[-1], dtype=torch.uint8, device=device)
        self._parts: list[Array] = []
        self._tensors: list[torch.Tensor] = []
        for array, start, dtype in itertools.zip_longest(arrays, ends[:-1], dtypes):
            value_dtype, end = torch.from_numpy(array).dtype if dtype is None else dtype, start + array.nbytes
            self._parts.append(memory[start:end].view(array.dtype).reshape(array.shape))
            self._tensors.append(self._block[start:end].view(value_dtype).view(array.shape))

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The same tensors each time, with the values of these arrays, by one copy."""
        for part, array in zip(self._parts, arrays, strict=True):
            part[...] = array
        upload(self._host, self._device, self._block)
        return self._tensors


class Sender:
    """Sends arrays to one device, those of the same shapes into the same tensors, which later ones write over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: dict[Hashable, SentArrays] = {}

    def __call__(self, arrays: Sequence[Array], dtypes: Sequence[torch.dtype | None] = ()) -> list[torch.Tensor]:
        """As `to_device`."""
        if is_host(self.device):
            return to_device(arrays, self.device, dtypes)
        key = tuple([(array.shape, array.dtype.char) for array in arrays])
        if key not in self._sent:
            self._sent[key] = SentArrays(arrays, self.device, dtypes)
        return self._sent[key].send(arrays)


def to_device(
    arrays: Sequence[Array], device: torch.device, dtypes: Sequence[torch.dtype | None] = ()
) -> list[torch.Tensor]:
    """Tensors with the arrays' values on `device`; on a CPU they share the arrays' memory.

    Args:
        dtypes: what the bits of an array mean, where that is not its own type.
    """
    if not is_host(device):
        return SentArrays(arrays, device, dtypes).send(arrays)
    tensors = map(torch.from_numpy, arrays)
    return [t if dtype is None else t.view(dtype) for t, dtype in itertools.zip_longest(tensors, dtypes)]


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(batch, longest)` token ids with `padding` in front of the shorter rows, and their mask of ones and zeros."""
    ids = [torch.tensor(row, dtype=torch.long, device=HOST) for row in rows]
    seen = [torch.ones_like(row) for row in ids]
    padded = pad_sequence(ids, batch_first=True, padding_value=padding, padding_side="left")
    return padded.to(device), pad_sequence(seen, batch_first=True, padding_side="left").to(device)


def additive_bits(visible: Array, dtype: torch.dtype, lowest: float = -math.inf) -> Array:
    """0 where a bool array is true and `lowest` elsewhere, as the bits of `dtype`: NumPy has no bfloat16."""
    if dtype == torch.bool:
        return visible
    hidden = _bits_of(lowest, dtype)
    return np.where(visible, hidden.dtype.type(0), hidden)


@functools.cache
def _bits_of(value: float, dtype: torch.dtype) -> Array:
    """The bits of a number in `dtype`, a scalar of an integer type as wide."""
    same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits: Array = torch.tensor(value, dtype=dtype, device=HOST).view(same).numpy()
    return bits
