"""One model in several processes (tensor parallel): the first one's messages, and errors of one that are raised in all.

The model's forwards are collectives, so every process must run the same ones, in the same order. Between them all
processes exchange messages: those of the first count, those of the others tell of errors.
"""

import contextlib
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_specdec.compat.devices import device_mesh, is_shared
from hf_specdec.errors import RankError, UnsupportedModelError

LENGTH_BYTES = 8
FIRST_BYTES = 1 << 14  # of a value, in the first collective: the trees of a batch of sixteen with 64 nodes each


class RankSync:
    """The processes of one group.

    Args:
        device: where the group's collectives run.

    Attributes:
        is_leader (`bool`): whether this process is the first, which decides.
        is_open (`bool`): whether the others listen: none has failed, and the call has not ended.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.is_leader, self.is_open = dist.get_rank(group) == 0, True

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

    def exchange(self, message: Any = None, error: BaseException | None = None) -> Any:
        """The first process's message.

        Args:
            error: of this process, which ends the call in all of them.

        Raises:
            RankError: a process has an error.
        """
        parts = self.gather((message, error and f"{type(error).__name__}: {' '.join(str(error).split())}"))
        if reasons := [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(parts) if reason is not None]:
            self.is_open = False
            raise RankError(f"The processes of the model cannot go on together. {' | '.join(reasons)}") from error
        return parts[0][0]

    def abandon(self, error: BaseException) -> None:
        """Let no process wait for this one, which has failed. Within a forward, which all are in, it can tell none."""
        if self.is_open:
            with contextlib.suppress(RankError):
                self.exchange(error=error)

    def close(self) -> None:
        """All texts have ended, in all processes."""
        self.exchange()
        self.is_open = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around a forward of all processes."""
        before, self.is_open = self.is_open, False
        yield
        self.is_open = before

    def check(self, digests: Mapping[str, int]) -> None:
        """Make sure that all processes are called alike, before they compute anything together.

        Args:
            digests: a number for everything that has to be the same, by its name.

        Raises:
            RankError: something differs; it is named, in every process.
        """
        first, *others = self.gather(dict(digests))
        if names := {name for other in others for name, _ in first.items() ^ other.items()}:
            self.is_open = False
            raise RankError(
                f"All processes of a tensor-parallel model must be called alike, but {' and '.join(sorted(names))} "
                "differ between them. Give every process the same inputs and arguments."
            )

    def share_random_state(self) -> None:
        """Give all processes the first one's random state."""
        accelerator = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        of_device = None if accelerator is None else accelerator.get_rng_state(self.device)
        state, of_device = self.exchange((torch.get_rng_state(), of_device))
        torch.set_rng_state(state)
        if accelerator is not None:
            accelerator.set_rng_state(of_device, self.device)


def rank_sync_of(model: PreTrainedModel) -> RankSync | None:
    """Synchronisation of a tensor-parallel model's processes; `None` for any other model.

    Raises:
        UnsupportedModelError: the model is shared out in a way that cannot be followed here.
    """
    if not is_shared(model):
        return None
    mesh = device_mesh(model)
    names = mesh.mesh_dim_names or ("tp",)
    others = [name for name, size in zip(names, mesh.shape, strict=True) if name != "tp" and size > 1]
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} is shared out by {others[0]}. With spec_method only tensor parallelism works, "
            'distributed_config=DistributedConfig(tp_plan="auto").'
        )
    return RankSync((mesh["tp"] if mesh.ndim > 1 else mesh).get_group(), model.device)


def any_process(model: PreTrainedModel, flag: bool) -> bool:
    """True if `flag` holds in any process of the model; all of them ask."""
    rank_sync = rank_sync_of(model)
    return flag if rank_sync is None else any(rank_sync.gather(flag))


def digest(value: Any) -> int:
    """A number for what a value holds: of a tensor its shape and, if they are no floats, its numbers."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    shape = zlib.crc32(repr(tuple(value.shape)).encode())
    if value.is_floating_point():  # may differ in the last place from one machine to another
        return shape
    return zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), shape)
