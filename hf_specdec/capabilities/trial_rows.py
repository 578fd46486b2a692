"""What a model can do, found out by the first steps of a batch whose rows have different lengths.

No draft is verified before. After a few steps of one token the beginnings of two texts are computed plainly as well,
over caches of the model's own; then the next two steps compute the last tokens of all rows once more, as trees and as
chains (see `TrialRunner`). Where any logits differ the batch is given up: `TrialFailed` says so, nobody gets anything
of it, and the probe decides how its prompts are decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.capabilities.reference import EXACT, Mismatch, compare, relative_error, rounds_exactly
from hf_specdec.capabilities.trial import (
    AFTER_WRONG,
    NUM_REFERENCES,
    allowed_after,
    amid_wrong_ones,
    beginnings,
)
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.tree import DraftTree

__all__ = ["RowTrial", "RowTrialRunner", "TrialFailed"]

NUM_PLAIN = 2  # rows whose first tokens are computed plainly as well
MOST_STEPS = 4 * NUM_REFERENCES  # of one token, while too few rows go on for long enough


class TrialFailed(Exception):
    """A batch did not show that its model verifies trees of its rows."""


class RowTrial:
    """The trial that a job's batches share.

    Args:
        decide: called once with the largest error, the number of rows that were tried and whether there may be other
            rows beside them; returns whether drafts may be verified from then on.
        most_rows: rows that a batch may have; a trial waits for two where it may have as many.
        knows_trees: whether trees of one row are known to be right.

    Attributes:
        is_over (`bool`): whether drafts are verified.
        is_last (`bool`): whether no prompt follows those that are being decoded.
        num_plain (`int`): sequences whose prompts were read over a cache of the model's own.
    """

    def __init__(
        self, decide: Callable[[float, int, bool], bool], most_rows: int, *, knows_trees: bool = False
    ) -> None:
        self.decide, self.most_rows, self.knows_trees = decide, most_rows, knows_trees
        self.is_over = self.is_last = False
        self.num_plain = 0


@dataclass(slots=True)
class _Row:
    """What is known of one row of the batch.

    Attributes:
        prompt_length: tokens of its prompt.
        plain: the model's own cache after the prompt and what `generate` keeps beside it, of rows computed plainly.
        references: `(vocab_size,)` each, the logits after its tokens as steps of one token gave them.
        tried_from: tokens in front of the last `NUM_REFERENCES` ones, once these were tried as a tree.
    """

    prompt_length: int
    plain: tuple[Any, dict[str, Any]] | None = None
    references: list[torch.Tensor] = field(default_factory=list)
    tried_from: int | None = None


class RowTrialRunner(ModelRunner):
    """The model of a sequence whose batch may be tried; of the whole batch, where it is the first of it.

    Args:
        arguments: as of `ModelRunner`, for one sequence, without its tier.
        trial: of the job.
    """

    def __init__(self, *arguments: Any, trial: RowTrial, **others: Any) -> None:
        super().__init__(*arguments, tier="tree", **others)
        self.trial = trial
        self._known = [_Row(self.input_ids.shape[1])]
        self._kept: dict[int, list[int]] = {}  # by row: nodes of its tree that the step keeps
        self._tolerance, self._error, self._num_steps = EXACT, 0.0, 0
        self._reads_plainly = not trial.is_over and trial.num_plain < NUM_PLAIN
        trial.num_plain += self._reads_plainly
        if self._reads_plainly:
            self.kwargs[compat.cache_name(self.kwargs)] = self.cache.handed_out

    @property
    def copies_prefix(self) -> bool:
        """Whether the cache may begin with another row's columns."""
        return not self._reads_plainly

    def prefill(self) -> Any:
        """The prompt's forward; of the rows that are computed plainly over the model's own cache, which is kept."""
        outputs = super().prefill()
        if self._reads_plainly:
            own = self.cache.handed_out
            self._known[0].plain = own, {**self.kwargs, compat.cache_name(self.kwargs): own}
        return outputs

    def drafts_now(self, row: int) -> bool:
        """Whether tokens may be drafted: not before the model was tried."""
        return self.trial.is_over and super().drafts_now(row)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        super().select(rows)
        self._known = [self._known[row] for row in rows]

    def admit(self, other: ModelRunner, row: int | None) -> None:
        """Take over the one row of `other`, and what is known of it."""
        super().admit(other, row)
        at = len(self._known) if row is None else row
        new = other._known if isinstance(other, RowTrialRunner) else [_Row(0)]  # noqa: SLF001 another of the same class
        self._known[at : at + 1] = new

    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The nodes' logits; until the trial is over the roots', now and then by a forward that is compared."""
        self.tells_costs = True
        if self.trial.is_over:
            return super().forward(trees)
        try:
            return self._forward(trees)
        except Exception as error:
            raise TrialFailed(str(error)) from error

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes; of rows that are being tried the beginnings of their trees."""
        super().commit([self._kept.get(row, path) for row, path in enumerate(paths)])
        self._kept = {}

    @property
    def _is_alone(self) -> bool:
        """Whether no other row can join this one."""
        return len(self._known) == 1 and (self.trial.is_last or self.trial.most_rows == 1)

    def _forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The next forward of the trial."""
        if self.trial.knows_trees and self._is_alone:
            self.trial.is_over = True
            return super().forward(trees)
        if any(row.tried_from is not None for row in self._known):
            return self._try_chains(trees)
        ready = [place for place, row in enumerate(self._known) if len(row.references) >= NUM_REFERENCES]
        most_rows = len(self._known) if self.trial.is_last else self.trial.most_rows
        are_enough = len(ready) == len(self._known) and len(ready) >= min(NUM_PLAIN, most_rows)
        if are_enough or self._num_steps == MOST_STEPS:
            if not any(self._known[place].plain for place in ready):
                raise Mismatch("none of its texts was long enough to try it")
            return self._try_trees(trees, ready)
        self._num_steps += 1
        logits = super().forward(trees)
        for row, found in zip(self._known, logits, strict=True):
            row.references.append(found[0].float())
        return logits

    def _try_trees(self, trees: Sequence[DraftTree | None], ready: Sequence[int]) -> list[torch.Tensor]:
        """The roots' logits, by a forward of the last tokens of the rows in `ready` as trees amid wrong tokens.

        Raises:
            Mismatch: logits differ from the references by more than rounding explains.
        """
        self.tells_costs = False
        plain, noise = self._decoded_plainly(ready)
        texts, drafted = self.texts, dict[int, tuple[DraftTree, list[int]]]()
        for place in ready:
            first = self._known[place].tried_from = len(texts[place]) - 1 - NUM_REFERENCES
            drafted[place] = amid_wrong_ones(self.model, texts[place].tokens[first:])
        self._rewind_to([row.tried_from for row in self._known])
        lengths = [
            len(text) if row.tried_from is None else row.tried_from + 1
            for row, text in zip(self._known, texts, strict=True)
        ]
        self.texts = beginnings(texts, lengths)
        try:
            rows = super().forward([drafted[row][0] if row in drafted else tree for row, tree in enumerate(trees)])
        finally:
            self.texts = texts
        pairs, influence = [], 0.0
        for place, (_, path) in drafted.items():
            wanted = torch.stack(self._known[place].references[-NUM_REFERENCES:])
            pairs.append((rows[place][path[:-1]].float(), wanted))
            influence = max(influence, relative_error(rows[place][AFTER_WRONG].float(), wanted[2]))
            self._kept[place] = path[: 2 + place % 2]  # different lengths
            self._rows[place] = slice(path[-1], path[-1] + 1)
        if not rounds_exactly(self.model):
            self._tolerance = allowed_after(self.model, noise=noise, influence=influence)
        self._error = max(compare(found, wanted, self._tolerance) for found, wanted in (*pairs, *plain))
        return [self.outputs.logits[row, last] for row, last in enumerate(self._rows)]

    def _try_chains(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The roots' logits, by a forward of all that the cache lacks since the trees; raises as `_try_trees`."""
        self.tells_costs = False
        logits = super().forward(trees)
        num_tried = 0
        for place, (row, new) in enumerate(zip(self._known, self._rows, strict=True)):
            if row.tried_from is None:
                continue
            num_tried += 1
            wanted = torch.stack(row.references[-NUM_REFERENCES:])[self._num_cached[place] - row.tried_from :]
            found = self.outputs.logits[place, : new.start][: len(wanted)].float()
            self._error = max(self._error, compare(found, wanted, self._tolerance))
        self.trial.is_over = self.trial.decide(self._error, num_tried, not self._is_alone)
        if not self.trial.is_over:
            raise TrialFailed("its rows cannot be told apart")
        for row in self._known:
            row.plain, row.references = None, []
        return logits

    def _decoded_plainly(self, ready: Sequence[int]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], float]:
        """Logits after the first tokens of the rows that have a cache of the model's own, with those of the batch.

        In half precision two tokens of each, and what rounding does to them where they are computed at once.
        """
        count = 1 if rounds_exactly(self.model) else 2
        pairs, noise = [], 0.0
        for place in ready:
            row = self._known[place]
            if row.plain is None:
                continue
            (own, first), ids, length = row.plain, self.texts[place].ids(), row.prompt_length
            kwargs, found = dict(first), []
            for end in range(length + 1, length + count + 1):
                inputs = self.model.prepare_inputs_for_generation(ids[:, :end], next_sequence_length=1, **kwargs)
                with self._kernels:
                    outputs = self.model(**inputs, return_dict=True)
                kwargs = compat.updated_kwargs(self.model, outputs, kwargs)
                found.append(outputs.logits[0, -1].float())
            pairs.append((torch.stack(found), torch.stack(row.references[:count])))
            if count > 1:
                own.crop(-count)
                kwargs = compat.updated_kwargs(self.model, outputs, dict(first), num_new_tokens=count - 1)
                inputs = self.model.prepare_inputs_for_generation(
                    ids[:, : length + count], next_sequence_length=count, **kwargs
                )
                with self._kernels:
                    at_once = self.model(**inputs, return_dict=True).logits[0].float()
                noise = max(noise, relative_error(at_once, pairs[-1][0]))
        return pairs, noise

    def _rewind_to(self, lengths: Sequence[int | None]) -> None:
        """Forget what the cache holds of each row beyond these tokens; `None` leaves a row as it is."""
        assert self.cache.spec is not None
        self._num_cached = [
            cached if length is None else length for cached, length in zip(self._num_cached, lengths, strict=True)
        ]
        self.cache.spec.truncate(self._num_cached)
