"""Many prompts through one batch: a sequence that ends makes room for the next prompt at once (in-flight batching).

Knows nothing of tokenizers, files or `generate`.
"""

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch

from hf_specdec.cache.prefix_cache import PrefixCache
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sequence import SequenceState, check_own_drafters
from hf_specdec.engine.step import StepRunner
from hf_specdec.forward.prompt import keep_text


@dataclass(frozen=True, slots=True)
class QueuedSequence:
    """A prompt that waits for a place: a batch of its own whose target has read nothing yet.

    Attributes:
        columns (`int`): cache columns that its text will need at most.
        prefix_key: of texts in a `PrefixCache` that it may start with.
    """

    batch: Batch
    columns: int
    prefix_key: Hashable

    @property
    def sequence(self) -> SequenceState:
        """Its one sequence."""
        return self.batch.sequences[0]


class ContinuousBatching:
    """Decodes queued sequences in a batch of at most `max_rows`, none waiting for another to end.

    Args:
        steps: takes the batch one step further.
        max_columns (`int`): bound on rows x longest text, in tokens: the size of the key/value buffers. A sequence that
            alone exceeds it is decoded alone.
        prefixes: texts that prompts may start with, and where texts are kept.
    """

    def __init__(self, steps: StepRunner, *, max_rows: int, max_columns: int, prefixes: PrefixCache) -> None:
        self._steps, self.prefixes = steps, prefixes
        self.max_rows, self.max_columns = max_rows, max_columns
        self._keys: dict[SequenceState, Hashable] = {}  # of sequences whose texts are kept, in `prefixes`
        self._batch: Batch | None = None
        self._columns: list[int] = []  # needed by each sequence of the batch
        self._next: QueuedSequence | None = None

    @torch.no_grad()
    def run(self, queue: Iterator[QueuedSequence | None]) -> Iterator[SequenceState]:
        """Yield sequences as their texts end, or fail: then `sequence.error` says how.

        Args:
            queue: asked only when there is room; `None` says that nothing is waiting now.
        """
        try:
            while True:
                yield from self._fill(queue)
                if self._batch is None:
                    self._steps.end()
                    return
                self._steps.run(self._batch)
                for place, sequence in enumerate(self._batch.sequences):
                    if sequence.finished:
                        if sequence in self._keys and sequence.error is None:
                            keep_text(self._batch.target, self.prefixes, self._keys[sequence], place)
                        yield self._ended(sequence)
        finally:
            with contextlib.ExitStack() as stack:
                for batch in (self._batch, None if self._next is None else self._next.batch):
                    if batch is not None:
                        stack.callback(batch.close)
                self._batch = self._next = None

    def _ended(self, sequence: SequenceState) -> SequenceState:
        self._keys.pop(sequence, None)
        sequence.end()
        return sequence

    def _fill(self, queue: Iterator[QueuedSequence | None]) -> Iterator[SequenceState]:
        """Put waiting sequences in the places of ended ones and after the last; yields those that end at once."""
        while (queued := self._waiting(queue)) is not None:
            self._read(queued)
            if queued.sequence.finished:
                queued.batch.close()
                self._next = None
                yield self._ended(queued.sequence)
            else:
                self._admit(queued)
                self._next = None
        if self._batch is None:
            return
        live = [place for place, sequence in enumerate(self._batch.sequences) if not sequence.finished]
        if not live:
            self._batch.close()
            self._batch, self._columns = None, []
        elif len(live) < len(self._batch.sequences):
            self._batch.select(live)
            self._columns = [self._columns[place] for place in live]

    def _waiting(self, queue: Iterator[QueuedSequence | None]) -> QueuedSequence | None:
        """The next sequence, if there is room for it."""
        sequences = self._batch.sequences if self._batch is not None else []
        live = [columns for columns, s in zip(self._columns, sequences, strict=True) if not s.finished]
        if len(live) >= self.max_rows:
            return None
        if self._next is None:
            self._next = next(queue, None)
            if self._next is not None:
                check_own_drafters(
                    self._next.sequence.drafter, [sequence for sequence in sequences if not sequence.finished]
                )
        queued = self._next
        if queued is None or not live:
            return queued
        return queued if (len(live) + 1) * max(*live, queued.columns) <= self.max_columns else None

    def _read(self, queued: QueuedSequence) -> None:
        """The prompt's forward and the first token; the beginning that another text has in common is copied."""
        sequence, target, prompt = queued.sequence, queued.batch.target, queued.batch.prompt
        sequence.isolates_errors, sequence.isolates_drafter = True, queued.batch.draft_runner is None
        reuse = prompt.reuse()
        weights = state_of(target.model).weights.of(target.model) if reuse.step and self.prefixes.max_bytes else None
        key = queued.prefix_key, weights, reuse.step
        try:
            if reuse.step:
                sequence.stats.num_cached_tokens = prompt.load(self.prefixes, key, reuse)
            self._steps.begin(queued.batch)
        except Exception as error:  # noqa: BLE001 - that of this sequence alone
            sequence.fail(error)
            return
        if reuse.step and len(sequence.prompt) >= reuse.least:
            prompt.keep(self.prefixes, key, reuse.step)
        if reuse.takes_answers:
            self._keys[sequence] = key

    def _admit(self, queued: QueuedSequence) -> None:
        """Give a sequence whose prompt is read the place of an ended one, or one after the last."""
        batch = self._batch
        if batch is None or not batch.num_live:
            if batch is not None:
                batch.close()
            queued.batch.target.reserve_rows(self.max_rows, self.max_columns)
            self._batch, self._columns = queued.batch, [queued.columns]
            return
        free = next((place for place, sequence in enumerate(batch.sequences) if sequence.finished), None)
        batch.admit(queued.batch, free)
        at = len(self._columns) if free is None else free
        self._columns[at : at + 1] = [queued.columns]
