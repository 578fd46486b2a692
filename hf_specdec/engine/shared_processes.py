"""Decoding in several processes that share one model: the first process decides, the others follow.

Each class here is one of a single process with the exchange between the processes around it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specdec.common.observer import SpecStep
from hf_specdec.common.stats import SpecStats
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.generation import PROCESSORS_MODULE
from hf_specdec.distributed.rank_sync import RankSync, rank_sync_of
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.sampling.random_streams import drawn_seed
from hf_specdec.engine.sampling.sampler import Sampler
from hf_specdec.engine.sequence import OnToken
from hf_specdec.engine.step import StepRunner
from hf_specdec.engine.stopping import StopCheck
from hf_specdec.errors import RankError
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.forward.node_outputs import NodeOutputs
from hf_specdec.forward.prompt_logits import TopTokens
from hf_specdec.forward.token_buffer import TokenBuffer

NEAR = {torch.float32: 1e-3, torch.float64: 1e-3}  # what rounding can do to a logit, relative to the largest
NEAR_IN_HALVES = 0.1

Observer = Callable[[SpecStep], None]


class SharedStepRunner(StepRunner):
    """Steps whose forwards are collectives, and whose trees, tokens and ends are the first process's."""

    is_shared = True

    def __init__(
        self, stats: SpecStats, *, budget: Budget | None, observer: Observer | None, rank_sync: RankSync
    ) -> None:
        super().__init__(stats, budget=budget, observer=observer)
        self.rank_sync, self.leads = rank_sync, rank_sync.is_leader

    def listen(self, on_token: OnToken) -> None:
        """See `StepRunner`."""
        super().listen(functools.partial(self.rank_sync.attempt, on_token))

    def sampler(self, *args: Any, **kwargs: Any) -> Sampler:
        """See `StepRunner`."""
        return AgreedSampler(*args, **kwargs, rank_sync=self.rank_sync)

    def stop_check(self, criteria: StoppingCriteriaList) -> StopCheck:
        """See `StepRunner`."""
        return AgreedStopCheck(criteria, self.rank_sync)

    def seed(self) -> int:
        """See `StepRunner`."""
        return self.rank_sync.decide_now(drawn_seed)

    def network(self, draft_runner: BaseDraftRunner | None) -> BaseDraftRunner | None:
        """The draft network: everywhere if it is shared, else where drafts are made."""
        if draft_runner is not None and draft_runner.is_shared:
            draft_runner.around = self._around_draft
            return draft_runner
        return draft_runner if self.leads else None

    def check(self, digests: Callable[[], Mapping[str, int]]) -> None:
        """See `StepRunner`."""
        self.rank_sync.check(digests)

    def flush(self) -> None:
        """See `StepRunner`."""
        self.rank_sync.flush()

    def abandon(self, error: BaseException) -> None:
        """See `StepRunner`."""
        self.rank_sync.abandon(error)

    def share_random_state(self) -> None:
        """See `StepRunner`."""
        self.rank_sync.share_random_state()

    def can_go_on(self) -> bool:
        """See `StepRunner`."""
        return self.rank_sync.intact

    def end(self) -> None:
        """See `StepRunner`."""
        super().end()
        self.rank_sync.finish()

    @contextlib.contextmanager
    def _around_draft(self, trees: Sequence[DraftTree | None] | None) -> Iterator[None]:
        """Announces the trees that a draft network scores; where it reads its texts, what was decided."""
        if trees is None:
            self.rank_sync.flush()
        else:
            self.rank_sync.score(trees)
        with self.rank_sync.forward():
            yield

    def _trees(self, batch: Batch, *how: Any) -> list[DraftTree]:
        return self.rank_sync.trees(lambda: self._propose(batch, *how), batch.draft_runner)

    def _prefill(self, batch: Batch) -> list[TopTokens | None]:
        with self.rank_sync.forward():
            return super()._prefill(batch)

    def _forward(self, batch: Batch, trees: list[DraftTree]) -> tuple[list[DraftTree], list[NodeOutputs], bool]:
        with self.rank_sync.forward():
            return super()._forward(batch, trees)

    def _show(self, *step: Any) -> None:
        self.rank_sync.attempt(super()._show, *step)


class AgreedSampler(Sampler):
    """Chooses the first process's tokens; the others check that their logits allow them."""

    def __init__(self, processors: LogitsProcessorList, *args: Any, rank_sync: RankSync) -> None:
        super().__init__(processors, *args)
        self._rank_sync = rank_sync
        has_own = any(type(processor).__module__ != PROCESSORS_MODULE for processor in processors)
        self._is_watched = self.keeps or has_own or not self.needs_rows  # else choosing has a cost and no one sees it

    def choose(self, node: int, text: TokenBuffer) -> int:
        """See `Sampler.choose`."""
        choose = super().choose
        return self._rank_sync.decide(
            lambda: choose(node, text),
            is_watched=self._is_watched,
            confirm=lambda token: self.confirm(node, token),
        )

    def confirm(self, node: int, token: int) -> None:
        """Raise where the row of `node` has no way to lead to `token`, which another process found in its own.

        Raises:
            RankError: rounding does not explain it.
        """
        if self.needs_rows:
            return
        row = self._rows.logits[node].float()
        gap = float((row.max() - row[token]) / row.abs().max().clamp(min=1e-6))
        if not gap <= NEAR.get(self._rows.logits.dtype, NEAR_IN_HALVES):
            raise RankError(
                f"the logits after the text's token {node} of the draft differ between the processes: rank 0 chose "
                f"{token}, here {int(row.argmax())} leads by {gap:.1g} of the largest. Are the weights the same, and "
                "the model in eval mode?"
            )


class AgreedStopCheck(StopCheck):
    """Ends texts where the first process does."""

    def __init__(self, criteria: StoppingCriteriaList, rank_sync: RankSync) -> None:
        super().__init__(criteria)
        self._rank_sync = rank_sync
        of_transformers = (MaxTimeCriteria, StopStringCriteria)
        self._is_watched = any(
            type(criterion) not in of_transformers for criterion in self.others
        )  # the user's may keep count

    def __call__(self, text: TokenBuffer, scores: list[torch.Tensor] | None) -> bool:
        """See `StopCheck`."""
        ends = super().__call__
        return bool(self._rank_sync.decide(lambda: ends(text, scores), is_watched=self._is_watched))


def steps_of_model(
    model: PreTrainedModel, stats: SpecStats, *, budget: Budget | None, observer: Observer | None
) -> StepRunner:
    """Steps of the processes that share `model`."""
    rank_sync = rank_sync_of(model)
    if rank_sync is None:
        return StepRunner(stats, budget=budget, observer=observer)
    return SharedStepRunner(stats, budget=budget, observer=observer, rank_sync=rank_sync)


def agreed_seed(model: PreTrainedModel) -> int:
    """A seed that all processes of `model` have, drawn from the first one's global generator."""
    rank_sync = rank_sync_of(model)
    return drawn_seed() if rank_sync is None else rank_sync.decide_now(drawn_seed)


def agreed_criteria(criteria: StoppingCriteriaList, rank_sync: RankSync | None) -> StoppingCriteriaList:
    """The criteria for transformers' own loops, where all processes stop as the first one does."""
    if rank_sync is None:
        return criteria
    alike = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
    return StoppingCriteriaList(
        criterion if type(criterion) in alike else _AgreedCriterion(criterion, rank_sync) for criterion in criteria
    )


class _AgreedCriterion(StoppingCriteria):
    """Result of a criterion in the first process."""

    def __init__(self, criterion: Callable[..., Any], rank_sync: RankSync) -> None:
        self.criterion, self.rank_sync = criterion, rank_sync

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        stops = torch.as_tensor(self.criterion(input_ids, scores, **kwargs)).expand(len(input_ids))
        agreed = [bool(self.rank_sync.decide_now(lambda row=row: int(row))) for row in stops]  # type: ignore[misc]
        return torch.tensor(agreed, device=input_ids.device)  # type: ignore[return-value]
