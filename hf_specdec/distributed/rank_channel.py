"""Broadcasts between the processes of one tensor-parallel model; a failure in one of them is raised in all."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from hf_specdec.errors import RankError

LENGTH_BYTES = 8
FIRST_BYTES = 1 << 14  # of a value, in the first collective: the trees of a batch of sixteen with 64 nodes each


class RankChannel:
    """The processes of one group.

    Args:
        device: where the group's collectives run.

    Attributes:
        rank (`int`): of this process; 0 leads.
        intact (`bool`): whether all are well; once not, nothing is exchanged any more.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank = group, device, dist.get_rank(group)
        self.intact = True

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank: one collective, and another one where a value is long."""
        content = pickle.dumps(value)
        parts = self._all_gather(
            len(content).to_bytes(LENGTH_BYTES) + content[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES
        )
        lengths = [int.from_bytes(part[:LENGTH_BYTES]) for part in parts]
        values = [part[LENGTH_BYTES:] for part in parts]
        if max(lengths) > FIRST_BYTES:
            rest = self._all_gather(content[FIRST_BYTES:], max(lengths) - FIRST_BYTES)
            values = [first + more for first, more in zip(values, rest, strict=True)]
        return [pickle.loads(part[:length]) for part, length in zip(values, lengths, strict=True)]

    def _all_gather(self, content: bytes, size: int) -> list[bytes]:
        """Every process's bytes, filled up to `size`."""
        # torch's own memory: the collective's thread may be the last to hold it, and free it
        sent = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(self.device, copy=True)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(received, sent, group=self.group)
        return [part.cpu().numpy().tobytes() for part in received]

    def exchange(self, message: Any = None, pending_error: BaseException | None = None) -> Any:
        """The first process's message; those of the others are not looked at.

        Raises:
            RankError: a process has a pending error; raised in all of them, with this one's as the cause.
        """
        parts = self.gather((message, None if pending_error is None else describe(pending_error)))
        reasons = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(parts) if error is not None]
        if reasons:
            self.intact = False
            text = " | ".join(reasons)
            raise RankError(f"The processes of the model cannot go on together. {text}") from pending_error
        return parts[0][0]


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
