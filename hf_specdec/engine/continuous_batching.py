"""Many prompts through one batch: a row that ends makes room for the next prompt at once (in-flight batching).

Knows nothing of tokenizers, files or `generate`.

    stream = SpecStream(max_rows=8, max_columns=65536)
    for row in stream.run_all(guests):            # guests: an iterator, asked only when there is room
        row.text.emitted, row.stats, row.error
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.budget import Budget
from hf_specdec.engine.loop import Limits, SpecLoop
from hf_specdec.engine.row_isolation import GuardedDrafter
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.forward.draft_runner import DraftRunner
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.observer import SpecStep
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree

__all__ = ["QueuedSequence", "SpecStream"]

SHORTEST_PREFIX = 8  # tokens that two texts must share for their columns to be copied


@dataclass(frozen=True, slots=True)
class QueuedSequence:
    """A prompt that wants a row: its row, a target that has read nothing yet, its draft model if it has one.

    Attributes:
        columns (`int`): cache columns that its text will need at most.
        limits (`Limits`): the same for all guests of a stream.
    """

    row: SequenceState
    target: ModelRunner
    columns: int
    limits: Limits
    draft_model: DraftRunner | None = None


class SpecStream(SpecLoop):
    """Decodes guests in a batch of at most `max_rows`, none waiting for another to end.

    Args:
        max_columns (`int`): bound on rows x longest text, in tokens: the size of the key/value buffers. A guest that
            alone exceeds it is decoded alone.
        budget: decides how much of the drafts is verified; without one, all of it.
        observer: called with a `SpecStep` for every row after every verify step.
        agreement: of the processes that decode together; by default this one is alone.

    Attributes:
        stats: forwards and seconds of the whole stream; tokens and drafts are in each row's own.
        num_reused_columns (`int`): prompt tokens whose keys and values were copied from another row.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_columns: int,
        budget: Budget | None = None,
        observer: Callable[[SpecStep], None] | None = None,
        rank_sync: RankSync | None = None,
    ) -> None:
        self.rank_sync = rank_sync or RankSync()
        self.max_rows, self.max_columns = max_rows, max_columns
        self.stats = SpecStats()
        self.draft_model: DraftRunner | None = None
        self.budget, self.observer = budget, observer
        self.streamer = self.hidden_states = None
        self._whole_prompt = False
        self.num_reused_columns = 0
        self._active: list[SequenceState] = []
        self._needs: list[int] = []  # columns of each active row
        self._next: QueuedSequence | None = None

    @torch.no_grad()
    def run_all(self, guests: Iterator[QueuedSequence]) -> Iterator[SequenceState]:
        """Yield rows as their texts end, or fail: then `row.error` says how."""
        try:
            while True:
                yield from self._fill(guests)
                if not self._active:
                    self.rank_sync.settle()
                    return
                self._step()
                for row in self._active:
                    if row.finished:
                        self._end(row)
                        self.rank_sync.flush()
                        yield row
        except GeneratorExit:
            raise
        except BaseException as error:
            self.rank_sync.abandon(error)
            raise
        finally:
            for row in self._active:
                self._end(row)

    def _fill(self, guests: Iterator[QueuedSequence]) -> Iterator[SequenceState]:
        """Seat waiting guests in the places of finished rows and in new ones; yields those whose texts end at once."""
        while (guest := self._wanted(guests)) is not None:
            self._next = None
            self._read(guest)
            if guest.row.finished:
                self._end(guest.row)
                self.rank_sync.flush()
                yield guest.row
                continue
            self._seat(guest)
        live = [place for place, row in enumerate(self._active) if not row.finished]
        if len(live) < len(self._active):
            if live:
                self.target.select(live)
                if self.draft_model is not None:
                    self.draft_model.select(live)
            self._active = [self._active[place] for place in live]
            self._needs = [self._needs[place] for place in live]

    def _wanted(self, guests: Iterator[QueuedSequence]) -> QueuedSequence | None:
        """The next guest, if there is room for it."""
        live = [need for need, row in zip(self._needs, self._active, strict=True) if not row.finished]
        if len(live) >= self.max_rows:
            return None
        if self._next is None:
            self.rank_sync.flush()  # the next guest may be one that is decoded by itself
            self._next = next(guests, None)
        guest = self._next
        if guest is None or not live:
            return guest
        return guest if (len(live) + 1) * max(*live, guest.columns) <= self.max_columns else None

    def _read(self, guest: QueuedSequence) -> None:
        """The prompt's forward and the first token; what other rows know of the prompt is copied from them."""
        row = guest.row
        try:
            self.num_reused_columns += self._copy_prefix(guest)
            with self.rank_sync.forward():
                logits = guest.target.prefill().logits[0, -1:]
            row.sampler.load(logits, row.tree)
            row.emit(0, self._heard)
            self._begin(row, 0, logits, guest.draft_model)
            if self.rank_sync.is_alone and guest.draft_model is None:
                row.drafter = GuardedDrafter(row)
        except Exception as error:
            if not self.rank_sync.intact:
                raise
            row.error, row.finished = error, True
        except BaseException:
            self._end(row)
            raise

    def _copy_prefix(self, guest: QueuedSequence) -> int:
        """Start the guest's cache with the columns of the row that shares the longest beginning with it."""
        tokens, best, donor = guest.row.text.tokens, SHORTEST_PREFIX - 1, -1
        for place, row in enumerate(self._active):
            shared = _shared(tokens, row.text.tokens, min(len(tokens) - 1, self.target.fed(place)))
            if shared > best:
                best, donor = shared, place
        if donor < 0:
            return 0
        guest.target.copy_prefix(self.target, donor, best)
        return best

    def _seat(self, guest: QueuedSequence) -> None:
        free = next((place for place, row in enumerate(self._active) if row.finished), None)
        if all(row.finished for row in self._active):
            self.target, self.draft_model, self.limits = guest.target, guest.draft_model, guest.limits
            self._active, self._needs = [guest.row], [guest.columns]
            return
        self.target.admit(guest.target, free)
        if self.draft_model is not None and guest.draft_model is not None:
            self.draft_model.admit(guest.draft_model, free)
        if free is None:
            self._active.append(guest.row)
            self._needs.append(guest.columns)
        else:
            self._active[free], self._needs[free] = guest.row, guest.columns

    def _verdict(self, row: SequenceState, tree: DraftTree) -> VerifyResult:
        """An error among one row's processors or criteria ends that row alone."""
        try:
            return super()._verdict(row, tree)
        except Exception as error:
            if not self.rank_sync.intact:
                raise
            row.error, row.finished = error, True
            return VerifyResult([], [])

    def _end(self, row: SequenceState) -> None:
        try:
            row.end()
        except Exception as error:  # noqa: BLE001 a sequence's error is its own, whatever it is
            row.error = row.error or error


def _shared(ours: list[int], theirs: list[int], limit: int) -> int:
    """Length of the common beginning, up to `limit`."""
    count = 0
    while count < limit and ours[count] == theirs[count]:
        count += 1
    return count
