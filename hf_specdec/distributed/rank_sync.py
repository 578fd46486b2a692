"""One model in several processes (tensor parallel): the first decides, the others do as it says.

The model's forwards are collectives, so every process must run the same ones. The first process drafts, draws tokens
and asks stopping criteria; what it decided travels with the next trees, in one message a step. The others compute the
same forwards, follow, and check what they can: that all were called with the same inputs, and that their own logits
allow the first one's choice.
"""

import contextlib
import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from transformers import PreTrainedModel

from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.devices import device_mesh, is_shared
from hf_specdec.distributed.rank_channel import RankChannel, describe
from hf_specdec.errors import RankError, UnsupportedModelError

Trees = list[DraftTree | None]
Kind = Literal["decisions", "trees", "scores", "end"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Message of the first process to the others.

    Attributes:
        kind (`str`): what comes after the decisions: nothing yet, trees of the target or of a draft model, or the end.
        decisions (`list[int | str]`): in order; the text of an error where one ended in it.
    """

    kind: Kind
    decisions: list[int | str]
    trees: Trees = dataclasses.field(default_factory=list)


class Scores(Protocol):
    """The runner of a draft network in the same processes."""

    def score(self, trees: Sequence[DraftTree | None]) -> Any:
        """Compute the trees' new nodes."""


class RankSync(ABC):
    """Decisions of several processes.

    Attributes:
        is_leader (`bool`): whether this process decides.
    """

    is_leader: ClassVar[bool]

    def __init__(self, channel: RankChannel, device: torch.device) -> None:
        self.channel, self.device = channel, device
        self.is_computing = self.is_over = False

    @property
    def intact(self) -> bool:
        """True if the others still listen: none has failed, all is not decided yet, and no forward was interrupted."""
        return self.channel.intact and not self.is_computing and not self.is_over

    @abstractmethod
    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        """Result of `make` in the first process; its error is raised in all of them.

        Args:
            is_watched: whether anybody notices if `make` is not called in the other processes.
            confirm: told of the decision where a process's own `make` came to another one; raises if it cannot be.
        """

    @abstractmethod
    def decide_now(self, make: Callable[[], int]) -> int:
        """As `decide`, for a decision that is needed before the next trees."""

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        """Call what is not the first process's alone; an error in another process ends all at the next message."""
        function(*args)

    @abstractmethod
    def trees(self, propose: Callable[[], list[DraftTree]], draft_runner: Scores | None) -> list[DraftTree]:
        """The first process's trees; until they are there, the others compute what its draft runner asks for."""

    @abstractmethod
    def finish(self) -> None:
        """All is decided."""

    def score(self, trees: Sequence[DraftTree | None]) -> None:
        """Announce a forward of a draft model that is in all processes."""
        return

    def flush(self) -> None:
        """Let the others know what was decided."""
        return

    def abandon(self, error: BaseException) -> None:
        """An error ends the call: let no one wait."""
        return

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of all processes: an error in there may be one process's own, and no one can be told."""
        before, self.is_computing = self.is_computing, True
        yield
        self.is_computing = before

    def check(self, digests: Callable[[], Mapping[str, int]]) -> None:
        """Make sure that all processes are called alike, before they compute anything together.

        Args:
            digests: gives a number for everything that has to be the same, by its name.

        Raises:
            RankError: something differs; it is named, in every process.
        """
        self.flush()
        first, *others = self.channel.gather(dict(digests()))
        names = {name for other in others for name, _ in first.items() ^ other.items()}
        if names:
            self.channel.intact = False
            raise RankError(
                f"All processes of a tensor-parallel model must be called alike, but {' and '.join(sorted(names))} "
                "differ between them. Give every process the same inputs and arguments."
            )

    def share_random_state(self) -> None:
        """Give all processes the first one's random state."""
        accelerator = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        of_device = None if accelerator is None else accelerator.get_rng_state(self.device)
        state, of_device = self.channel.gather((torch.get_rng_state(), of_device) if self.is_leader else None)[0]
        torch.set_rng_state(state)
        if accelerator is not None:
            accelerator.set_rng_state(of_device, self.device)


class _Leader(RankSync):
    """The process that decides."""

    is_leader = True

    def __init__(self, channel: RankChannel, device: torch.device) -> None:
        super().__init__(channel, device)
        self._decided: list[int | str] = []

    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        try:
            value = int(make())
        except Exception as error:
            self._decided.append(describe(error))
            raise
        self._decided.append(value)
        return value

    def decide_now(self, make: Callable[[], int]) -> int:
        value = self.decide(make)
        self.flush()
        return value

    def trees(self, propose: Callable[[], list[DraftTree]], draft_runner: Scores | None) -> list[DraftTree]:
        trees = propose()
        self._send("trees", trees)
        return trees

    def score(self, trees: Sequence[DraftTree | None]) -> None:
        self._send("scores", trees)

    def flush(self) -> None:
        if self._decided:
            self._send("decisions")

    def finish(self) -> None:
        self._send("end")
        self.is_over = True
        self.channel.exchange()

    def abandon(self, error: BaseException) -> None:
        if self.intact:
            with contextlib.suppress(RankError):
                self.channel.exchange(None, error)

    def _send(self, kind: Kind, trees: Sequence[DraftTree | None] = ()) -> None:
        """Sends the tree without the distributions, which stay where tokens are drawn."""
        decided, self._decided = self._decided, []
        bare = [tree and dataclasses.replace(tree, drafted_from=None, probabilities=None) for tree in trees]
        self.channel.exchange(Message(kind, decided, bare))


class _Follower(RankSync):
    """A process that does as the first one says."""

    is_leader = False

    def __init__(self, channel: RankChannel, device: torch.device) -> None:
        super().__init__(channel, device)
        self._message = Message("decisions", [])
        self._decisions: deque[int | str] = deque()
        self._pending_error: Exception | None = None

    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        while not self._decisions:
            self._receive()
        value = self._decisions.popleft()
        if isinstance(value, str):
            raise RankError(f"rank 0: {value}")
        if is_watched:
            self.attempt(self._compare, make, value, confirm)
        return value

    def decide_now(self, make: Callable[[], int]) -> int:
        return self.decide(make, is_watched=False)

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 raised in all processes with the next message
            self._pending_error = self._pending_error or error

    def trees(self, propose: Callable[[], list[DraftTree]], draft_runner: Scores | None) -> list[DraftTree]:
        while True:
            message = self._next()
            if message.kind == "trees":
                return [tree for tree in message.trees if tree is not None]
            if message.kind != "scores" or draft_runner is None:
                raise RankError(f"rank 0 is elsewhere in its work ({message.kind})")
            draft_runner.score(message.trees)

    def finish(self) -> None:
        if (message := self._next()).kind != "end":
            raise RankError(f"rank 0 is elsewhere in its work ({message.kind})")
        self.is_over = True
        self.channel.exchange(None, self._pending_error)

    def _next(self) -> Message:
        """The message that brings more than decisions; all of those have been followed."""
        while self._message.kind == "decisions" and not self._decisions:
            self._receive()
        if self._decisions:
            raise RankError("rank 0 decided more than this process has sequences for")
        message, self._message = self._message, Message("decisions", [])
        return message

    def _receive(self) -> None:
        if self._message.kind != "decisions":
            raise RankError(f"rank 0 has decided less than this process has sequences for ({self._message.kind})")
        self._message = self.channel.exchange(None, self._pending_error)
        self._decisions.extend(self._message.decisions)

    def _compare(self, make: Callable[[], int], decided: int, confirm: Callable[[int], None] | None) -> None:
        if int(make()) != decided and confirm is not None:
            confirm(decided)


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
    channel = RankChannel((mesh["tp"] if mesh.ndim > 1 else mesh).get_group(), model.device)
    return (_Leader if channel.rank == 0 else _Follower)(channel, model.device)


def any_process(model: PreTrainedModel, flag: bool) -> bool:
    """True if `flag` holds in any process of the model; all of them ask."""
    rank_sync = rank_sync_of(model)
    return flag if rank_sync is None else any(rank_sync.channel.gather(flag))


def digest(value: Any) -> int:
    """A number for what a value holds: of a tensor its shape and, if they are no floats, its numbers."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    shape = zlib.crc32(repr(tuple(value.shape)).encode())
    if value.is_floating_point():  # may differ in the last place from one machine to another
        return shape
    return zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), shape)
