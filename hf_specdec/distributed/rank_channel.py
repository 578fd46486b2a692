"""What the processes of one tensor-parallel model tell one another; a failure in one of them is raised in all."""

from typing import Any

import torch.distributed as dist

from hf_specdec.errors import RankError

__all__ = ["RankChannel"]


class RankChannel:
    """The processes of one group.

    Attributes:
        rank (`int`): of this process; 0 leads.
        intact (`bool`): whether all are well; once not, nothing is exchanged any more.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.intact = True

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def exchange(self, message: Any = None, pending_error: BaseException | None = None) -> Any:
        """The first process's message; those of the others are not looked at.

        Raises:
            RankError: a process has a pending error; raised in all of them, with this one's as the cause.
        """
        found = self.gather((message, None if pending_error is None else describe(pending_error)))
        reasons = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error is not None]
        if reasons:
            self.intact = False
            text = " | ".join(reasons)
            raise RankError(f"The processes of the model cannot go on together. {text}") from pending_error
        return found[0][0]


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
