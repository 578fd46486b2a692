"""One model in several processes (tensor parallel): the first decides, the others do as it says.

The model's forwards are collectives, so every process must run the same ones. The first process drafts, draws tokens
and asks stopping criteria; what it decided travels with the next trees, in one message a step. The others compute the
same forwards, follow, and check what they can: that all were called with the same inputs, and that their own logits
allow the first one's choice. In a single process all of this is nothing.

    agreement = rank_sync_of(model)
    agreement.check({"input_ids": digest(ids)})
    trees = agreement.trees(propose, draft_model)
    with agreement.forward():
        logits = target.forward(trees)
    token = agreement.decide(lambda: choose(logits))
    agreement.settle()
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from hf_specdec.compat.placement import device_mesh
from hf_specdec.distributed.rank_channel import RankChannel, Reader, write_text, write_trees
from hf_specdec.errors import RankError, UnsupportedModelError
from hf_specdec.tree import DraftTree

__all__ = ["RankSync", "digest", "rank_sync_of"]

DECISIONS, TREES, SCORES, END = range(4)  # what a message brings besides decisions
FAILED = -1  # stands for a decision that ended in an error
CHECKED = 32  # fields that an error can name
Trees = list[DraftTree | None]


class Scores(Protocol):
    """A draft model that lies in the same processes."""

    def score(self, trees: Sequence[DraftTree | None]) -> Any:
        """Compute the trees' new nodes."""


class RankSync:
    """Of a process that is alone: whatever is decided holds.

    Attributes:
        is_alone (`bool`): whether there is no other process.
        leads (`bool`): whether this process decides.
        intact (`bool`): whether the processes can go on together after an error.
    """

    is_alone = True
    is_leader = True
    intact = True

    def check(self, fields: Callable[[], Mapping[str, int]]) -> None:
        """Make sure that all processes are called alike, before they compute anything together.

        Args:
            fields: gives a digest for everything that has to be the same, by its name.

        Raises:
            RankError: something differs; it is named, in every process.
        """

    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        """What the first process's `make` returned; its error is an error everywhere.

        Args:
            is_watched: whether anybody notices if `make` is not called in the other processes.
            confirm: told of the decision where a process's own `make` came to another one; raises if it cannot be.
        """
        return make()

    def decide_now(self, make: Callable[[], int]) -> int:
        """As `decide`, for a decision that is needed before the next trees."""
        return make()

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds in any process; all of them ask."""
        return flag

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        """Call what is not the first process's alone; an error in another process ends all at the next message."""
        function(*args)

    def trees(self, propose: Callable[[], list[DraftTree]], draft_model: Scores | None) -> list[DraftTree]:
        """The first process's trees; until they are there, the others compute what its draft model asks for."""
        return propose()

    def score(self, trees: Sequence[DraftTree | None]) -> None:
        """Announce a forward of a draft model that lies in all processes."""

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward of all processes: an error in there may be one process's own, and nobody can be told."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Let the others know what was decided."""

    def settle(self) -> None:
        """All is decided."""

    def abandon(self, error: BaseException) -> None:
        """An error ends the call: let nobody wait."""

    def share_random_state(self) -> None:
        """Give all processes the first one's random state."""


class _Together(RankSync):
    """What the first process and the others have in common."""

    is_alone = False

    def __init__(self, wire: RankChannel) -> None:
        self.wire = wire
        self.is_computing = self.is_over = False

    @property
    def intact(self) -> bool:  # type: ignore[override]  # here it changes
        """Whether the others still listen: none has failed, all is not decided yet, and no forward was interrupted."""
        return self.wire.intact and not self.is_computing and not self.is_over

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        self.is_computing = True
        yield
        self.is_computing = False

    def forward(self) -> AbstractContextManager[None]:
        """See `RankSync.forward`."""
        return self._computing()

    def any(self, flag: bool) -> bool:
        """See `RankSync.any`."""
        return any(row[0] for row in self.wire.table([int(flag)]))

    def check(self, fields: Callable[[], Mapping[str, int]]) -> None:
        """See `RankSync.check`."""
        self.flush()
        found = fields()
        if len(set(map(tuple, self.wire.table([zlib.crc32(repr(sorted(found.items())).encode())])))) == 1:
            return
        names = sorted(found)[:CHECKED]
        row = [value for name in names for value in (zlib.crc32(name.encode()), found[name])]
        rows = self.wire.table([*row, *[0] * (2 * CHECKED - len(row))])
        others = {name for name in names for row in rows if not _has(row, name, found[name])}
        self.wire.intact = False
        raise RankError(
            f"All processes of a tensor-parallel model must be called alike, but {' and '.join(sorted(others))} "
            "differ between them. Give every process the same inputs and arguments."
        )

    def share_random_state(self) -> None:
        """See `RankSync.share_random_state`."""
        torch.set_rng_state(self.wire.share(torch.get_rng_state()))
        if self.wire.device.type != "cpu":
            own = torch.get_device_module(self.wire.device)
            own.set_rng_state(self.wire.share(own.get_rng_state(self.wire.device)), self.wire.device)


class _First(_Together):
    """The process that decides."""

    def __init__(self, wire: RankChannel) -> None:
        super().__init__(wire)
        self._decided: list[int] = []

    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        """See `RankSync.decide`."""
        try:
            value = make()
        except Exception as error:
            self._decided += [FAILED, *write_text(error)]
            raise
        self._decided.append(int(value))
        return value

    def decide_now(self, make: Callable[[], int]) -> int:
        """See `RankSync.decide_now`."""
        value = self.decide(make)
        self.flush()
        return value

    def trees(self, propose: Callable[[], list[DraftTree]], draft_model: Scores | None) -> list[DraftTree]:
        """See `RankSync.trees`."""
        trees = propose()
        self._send(TREES, write_trees(trees))
        return trees

    def score(self, trees: Sequence[DraftTree | None]) -> None:
        """See `RankSync.score`."""
        self._send(SCORES, write_trees(trees))

    def flush(self) -> None:
        """See `RankSync.flush`."""
        if self._decided:
            self._send(DECISIONS)

    def settle(self) -> None:
        """See `RankSync.settle`."""
        self._send(END)
        self.is_over = True
        self.wire.exchange([])

    def abandon(self, error: BaseException) -> None:
        """See `RankSync.abandon`."""
        if self.intact:
            with contextlib.suppress(RankError):
                self.wire.exchange(None, error)

    def _send(self, kind: int, content: Sequence[int] = ()) -> None:
        body = [kind, len(self._decided), *self._decided, *content]
        self._decided = []
        self.wire.exchange(body)


class _Other(_Together):
    """A process that follows."""

    is_leader = False

    def __init__(self, wire: RankChannel) -> None:
        super().__init__(wire)
        self._kind = DECISIONS
        self._decisions = Reader()
        self._trees: Trees = []
        self._trouble: Exception | None = None

    def decide(
        self, make: Callable[[], int], *, is_watched: bool = True, confirm: Callable[[int], None] | None = None
    ) -> int:
        """See `RankSync.decide`."""
        while not self._decisions:
            self._receive()
        value = self._decisions.integer()
        if value == FAILED:
            raise RankError(f"rank 0: {self._decisions.text()}")
        if is_watched:
            self.attempt(lambda: self._compare(make(), value, confirm))
        return value

    def decide_now(self, make: Callable[[], int]) -> int:
        """See `RankSync.decide_now`."""
        return self.decide(make, is_watched=False)

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        """See `RankSync.attempt`."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 whatever it is, all ranks raise it together
            self._trouble = self._trouble or error

    def trees(self, propose: Callable[[], list[DraftTree]], draft_model: Scores | None) -> list[DraftTree]:
        """See `RankSync.trees`."""
        while True:
            if self._kind == DECISIONS:
                self._receive()
            if self._decisions:
                raise RankError("rank 0 decided more than this process has rows for")
            kind, self._kind = self._kind, DECISIONS
            if kind == TREES:
                return [tree for tree in self._trees if tree is not None]
            if kind != SCORES or draft_model is None:
                raise RankError(f"rank 0 is elsewhere in its work ({kind})")
            draft_model.score(self._trees)

    def settle(self) -> None:
        """See `RankSync.settle`."""
        while self._kind == DECISIONS and not self._decisions:
            self._receive()
        if self._kind != END or self._decisions:
            raise RankError(f"rank 0 is elsewhere in its work ({self._kind})")
        self.is_over = True
        self.wire.exchange(None, self._trouble)

    def _receive(self) -> None:
        if self._kind != DECISIONS:
            raise RankError(f"rank 0 has decided less than this process has rows for ({self._kind})")
        message = Reader(self.wire.exchange(None, self._trouble))
        self._kind = message.integer()
        self._decisions = Reader(message.integers())
        if message:
            self._trees = message.trees()

    def _compare(self, mine: int, decided: int, confirm: Callable[[int], None] | None) -> None:
        if mine != decided and confirm is not None:
            confirm(decided)


def rank_sync_of(model: PreTrainedModel) -> RankSync:
    """What keeps the processes of a tensor-parallel model together; of any other model, nothing.

    Raises:
        UnsupportedModelError: the model is shared out in a way that cannot be followed here.
    """
    mesh = device_mesh(model)
    if mesh is None:
        return RankSync()
    names = mesh.mesh_dim_names or ("tp",)
    others = [name for name, size in zip(names, mesh.shape, strict=True) if name != "tp" and size > 1]
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} is shared out by {others[0]}. With spec_method only tensor parallelism works, "
            'distributed_config=DistributedConfig(tp_plan="auto").'
        )
    sharded = mesh["tp"] if mesh.ndim > 1 else mesh
    if sharded.size() == 1:
        return RankSync()
    wire = RankChannel(sharded.get_group(), model.device)
    return _First(wire) if wire.rank == 0 else _Other(wire)


def digest(value: Any) -> int:
    """A number for what a value holds: of a tensor its shape and, if they are no floats, its numbers."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    shape = zlib.crc32(repr(tuple(value.shape)).encode())
    if value.is_floating_point():  # may differ in the last place from one machine to another
        return shape
    return zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), shape)


def _has(row: Sequence[int], name: str, value: int) -> bool:
    """Whether a row of names' digests and values holds this one."""
    return dict(zip(row[::2], row[1::2], strict=True)).get(zlib.crc32(name.encode())) == value
