"""Decoding in several processes that share one model: the first one drafts, chooses and ends texts.

The others compute the same forwards with their parts of the model, and take over its trees, tokens and ends.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specdec.common.stats import SpecStats, SpecStep
from hf_specdec.common.tree import DraftTree
from hf_specdec.distributed.rank_sync import RankSync, rank_sync_of
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.sampling.random_streams import drawn_seed
from hf_specdec.engine.step import StepRunner
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.forward.node_outputs import NodeOutputs, TopTokens

Trees = Sequence[DraftTree | None]


class SharedStepRunner(StepRunner):
    """Steps whose forwards are collectives, and whose trees, tokens and ends are the first process's."""

    def __init__(
        self,
        stats: SpecStats,
        *,
        budget: Budget | None,
        observer: Callable[[SpecStep], Any] | None,
        rank_sync: RankSync,
    ) -> None:
        super().__init__(stats, budget=budget, observer=observer)
        self.rank_sync, self.leads = rank_sync, rank_sync.is_leader

    def seed(self) -> int:
        """See `StepRunner`."""
        return int(self.rank_sync.exchange(drawn_seed()))

    def network(self, draft_runner: BaseDraftRunner | None) -> BaseDraftRunner | None:
        """The draft network: everywhere if it is shared, else where drafts are made."""
        if draft_runner is not None and draft_runner.is_shared:
            draft_runner.around = self._around_draft
            return draft_runner
        return draft_runner if self.leads else None

    def abandon(self, error: BaseException) -> None:
        """See `StepRunner`."""
        self.rank_sync.abandon(error)

    def share_random_state(self) -> None:
        """See `StepRunner`."""
        self.rank_sync.share_random_state()

    def end(self) -> None:
        """See `StepRunner`."""
        super().end()
        self.rank_sync.close()

    @contextlib.contextmanager
    def _around_draft(self, trees: Trees | None) -> Iterator[None]:
        """Sends the trees that a draft network scores; none where it reads its prompts."""
        if trees is not None and self.leads:
            self._send(trees, is_drafting=True)
        with self.rank_sync.computing():
            yield

    def _send(self, trees: Trees, *, is_drafting: bool) -> None:
        """Send trees without their distributions, which stay where tokens are drawn."""
        bare = [tree and dataclasses.replace(tree, drafted_from=None, probabilities=None) for tree in trees]
        self.rank_sync.exchange((bare, is_drafting))

    def _trees(self, batch: Batch, *how: Any) -> list[DraftTree]:
        if self.leads:
            trees = super()._trees(batch, *how)
            self._send(trees, is_drafting=False)
            return trees
        while True:
            received, is_drafting = self.rank_sync.exchange()
            if not is_drafting:
                return list(received)
            assert batch.draft_runner is not None
            batch.draft_runner.score(received)

    def _choose(self, batch: Batch, trees: Sequence[DraftTree], results: list[VerifyResult]) -> None:
        if self.leads:
            super()._choose(batch, trees, results)
        ends = [sequence.finished for sequence in batch.sequences]
        chosen, ends = self.rank_sync.exchange((results, ends))
        if not self.leads:
            results += chosen
            for sequence, result, finished in zip(batch.sequences, results, ends, strict=True):
                sequence.follow(result, finished, self.on_token)

    def _prefill(self, batch: Batch) -> list[TopTokens | None]:
        with self.rank_sync.computing():
            return super()._prefill(batch)

    def _forward(self, batch: Batch, trees: list[DraftTree]) -> tuple[list[DraftTree], list[NodeOutputs], bool]:
        with self.rank_sync.computing():
            return super()._forward(batch, trees)


def steps_of(
    rank_sync: RankSync | None, stats: SpecStats, *, budget: Budget | None, observer: Callable[[SpecStep], Any] | None
) -> StepRunner:
    """Steps of one process, or of those that share a model."""
    if rank_sync is None:
        return StepRunner(stats, budget=budget, observer=observer)
    return SharedStepRunner(stats, budget=budget, observer=observer, rank_sync=rank_sync)


def agreed_seed(model: PreTrainedModel) -> int:
    """A seed that all processes of `model` have, drawn from the first one's global generator."""
    rank_sync = rank_sync_of(model)
    return drawn_seed() if rank_sync is None else int(rank_sync.exchange(drawn_seed()))


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
        agreed = self.rank_sync.exchange(stops.tolist())
        return torch.tensor(agreed, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]
