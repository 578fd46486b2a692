"""Logits of a target as drafters read them: the best next tokens after every node, brought by one transfer.

On an accelerator every read waits for all that was launched before, so one read brings what the verification and the
drafter want, for all sequences of a batch. On a CPU the compiled core finds the same in one pass over the logits' own
memory; without it, rows are looked at when somebody asks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.common.transfer import is_host
from hf_specdec.kernels import native

Array = npt.NDArray[Any]
Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, ...] | None]
ALL = slice(None)
AS_READ = {torch.float32: torch.float32, torch.bfloat16: torch.int16}  # what NumPy can hold of a dtype


@dataclass(frozen=True, slots=True)
class LogitsRead:
    """Numbers to read of a forward's logits.

    Attributes:
        num_top (`int | None`): the best token of each node and its `num_top` best; `None` where neither is wanted.
        first_of_equals (`bool`): whether the best token must be the first of those with the same logit.
        choose: on an accelerator, given a sequence's number and its part: `(T, ...)` tensors on the logits' device to
            be read as well, or `None`.
    """

    num_top: int | None
    first_of_equals: bool = True
    choose: Choose | None = None


class NodeLogits:
    """The logits of one forward's nodes and extra tokens.

    Args:
        logits: `(C, vocab_size)`, raw.
        read: `(C, 1 + 2K)` of them: the best token, the best K tokens, their log probabilities; `None` where nothing
            has been read.
        chosen: the `(T, ...)` arrays that a `Choose` found for the nodes.

    Attributes:
        is_spoiled (`bool`): whether a column of the forward has NaN for all its logits. Attention multiplies the values
            of hidden columns by 0, which makes NaN of those that are not finite, so no other column can be trusted.
    """

    __slots__ = ("_host", "_read", "_rows", "_whole", "chosen", "is_spoiled", "logits")

    def __init__(self, logits: torch.Tensor, read: Array | None = None, chosen: tuple[Array, ...] = ()) -> None:
        self.logits, self._read, self.chosen = logits, read, chosen
        self._host: Array | None = None
        self._whole: NodeLogits | None = None  # what this is rows `_rows` of
        self._rows, self.is_spoiled = ALL, False

    def part(self, rows: slice) -> "NodeLogits":
        """Some of the rows. On an accelerator, what is read of them is read of all rows here, by one transfer."""
        part = NodeLogits(self.logits[rows])
        if not is_host(self.logits.device):
            part._whole, part._rows = self, rows
        return part

    def __len__(self) -> int:
        """Rows C."""
        return len(self.logits)

    def best(self, rows: slice | list[int] = ALL) -> list[int]:
        """The token with the greatest logit in each row, the first of equals, as `torch.argmax` has it."""
        best: Any  # (rows,)
        if self._whole is not None:
            self.read_at_least(0)
        if self._read is not None:
            best = self._read[rows, 0].astype(np.int64)
        elif not is_host(self.logits.device):
            best = self.logits[rows].argmax(dim=-1)
        else:
            if self._host is None:
                self._host = self.logits.detach().float().numpy()  # NumPy's argmax takes a twentieth of torch's time
            best = self._host[rows].argmax(axis=-1)
        tokens: list[int] = best.tolist()
        return tokens

    def best_at(self, row: int) -> int:
        """`best` of one row."""
        if self._read is not None:
            return int(self._read[row, 0])
        return self.best(slice(row, row + 1))[0]

    def top(self, count: int, rows: slice | list[int] = ALL) -> tuple[Array, Array]:
        """The best `count` next tokens, likeliest first, `(rows, count)` int64, and their log probabilities, fp32."""
        count = min(count, self.logits.shape[-1])
        if self._whole is not None:
            self.read_at_least(count)
        if self._read is not None and self._read.shape[1] > 2 * count:
            most = self._read.shape[1] // 2
            read = self._read[rows]
            return read[:, 1 : 1 + count].astype(np.int64), read[:, 1 + most : 1 + most + count]
        read = read_logits(self.logits[rows], count)
        return read[:, 1 : 1 + count].astype(np.int64), read[:, 1 + count :]

    def read_at_least(self, count: int) -> Array:
        """`(C, 1 + 2K)` as the argument `read`, K at least `count`; by a transfer where that is not read yet."""
        if self._read is None or self._read.shape[1] <= 2 * count:
            whole = self._whole
            self._read = read_logits(self.logits, count) if whole is None else whole.read_at_least(count)[self._rows]
        return self._read


def read_rows(
    logits: torch.Tensor, rows: Sequence[slice], wanted: LogitsRead, *, best: torch.Tensor | None = None
) -> list[NodeLogits]:
    """Each sequence's part of a forward's logits, `(batch, C, vocab_size)`.

    Args:
        rows: which of the C are each sequence's.
        best: `(batch, C)`: the best tokens, where they are known.
    """
    parts, num_top = [logits[row, part_rows] for row, part_rows in enumerate(rows)], wanted.num_top
    firsts = [logits[..., 0]] if logits.shape[1] > 1 else []  # (batch, C), of forwards with drafts
    if is_host(logits.device) and (best is None or num_top):
        node_logits = [NodeLogits(part, _read_on_host(part, num_top)) for part in parts]
        return _marked(node_logits, logits, [first.isnan().numpy() for first in firsts])
    choose = None if is_host(logits.device) else wanted.choose
    chosen = [(choose(row, part) if choose else None) or () for row, part in enumerate(parts)]
    columns = [] if num_top is None else _best_and_top(logits, num_top, best, wanted.first_of_equals)
    host = read_tensors([*columns, *[tensor for tensors in chosen for tensor in tensors], *firsts])
    read = _columns([next(host) for _ in columns])
    node_logits = [
        NodeLogits(part, None if read is None else read[row, part_rows], tuple([next(host) for _ in tensors]))
        for row, (part_rows, part, tensors) in enumerate(zip(rows, parts, chosen, strict=True))
    ]
    return _marked(node_logits, logits, [np.isnan(first) for first in host])


def _marked(rows: list[NodeLogits], logits: torch.Tensor, are_nan: Sequence[Array]) -> list[NodeLogits]:
    """Says of each row whether it is spoiled; `are_nan` holds `(batch, C)`, whether the first logit is no number."""
    for are_first in are_nan:
        if are_first.any():  # one logit may be NaN by itself, of a token that was never initialised
            are_all = logits.isnan().all(dim=-1).any(dim=-1)  # (batch,)
            for row, is_spoiled in zip(rows, are_all.tolist(), strict=True):
                row.is_spoiled = is_spoiled
    return rows


def read_logits(logits: torch.Tensor, num_top: int = 0) -> Array:
    """`(..., 1 + 2 * num_top)` fp32 of `(..., vocab_size)` logits, as `NodeLogits` takes it; one transfer.

    Token ids are exact: fp32 holds every integer up to 16,777,216.
    """
    if (read := _read_on_host(logits, num_top)) is not None:
        return read
    columns = _columns(list(read_tensors(_best_and_top(logits, num_top))))
    assert columns is not None
    return columns


def _best_and_top(
    logits: torch.Tensor, num_top: int, best: torch.Tensor | None = None, first_of_equals: bool = True
) -> list[torch.Tensor]:
    """The columns that `read_logits` brings, on the logits' device."""
    num_top = min(num_top, logits.shape[-1])
    if best is not None:
        best = best[..., None]
    elif first_of_equals or not num_top:
        best = logits.argmax(dim=-1, keepdim=True)
    if not num_top:
        return [] if best is None else [best]
    # In fp32: a sum that is rounded to half precision is off by a sixteenth. `logsumexp` would be nine launches.
    top = logits.log_softmax(dim=-1, dtype=torch.float32).topk(num_top, dim=-1)
    return [top.indices[..., :1] if best is None else best, top.indices, top.values]


def _columns(parts: Sequence[Array]) -> Array | None:
    """`(..., columns of all parts)`; `None` without parts."""
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else next(iter(parts), None)


def read_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[Array]:
    """Tensors of a device as arrays, by one transfer; in fp32, exact for token ids, where there are several."""
    if len(tensors) < 2:
        yield from map(_on_host, tensors)
        return
    flat, end = _on_host(torch.cat([tensor.reshape(-1) for tensor in tensors])), 0
    for tensor in tensors:
        start, end = end, end + tensor.numel()
        yield flat[start:end].reshape(tensor.shape)


def _on_host(tensor: torch.Tensor) -> Array:
    """Its values, once the device has computed them."""
    values: Array = tensor.cpu().numpy()
    return values


def _read_on_host(logits: torch.Tensor, num_top: int | None) -> Array | None:
    """Reads as `read_logits` does, by the compiled core; `None` where it is not there or cannot read these logits."""
    core, as_read = native.core, AS_READ.get(logits.dtype)
    if not num_top or core is None or as_read is None or not is_host(logits.device):
        return None
    width, count = logits.shape[-1], min(num_top, logits.shape[-1])
    held = logits.detach().contiguous()
    held = held if held.dtype == as_read else held.view(as_read)
    read = np.empty((*logits.shape[:-1], 1 + 2 * count), dtype=np.float32)
    is_read = core.read_logits(held.numpy(), read, width, count)  # not where one is infinite, or is no number
    return read if is_read else None
