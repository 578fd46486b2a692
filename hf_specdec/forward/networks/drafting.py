"""Drafting with a network of any kind: the drafters of all rows are asked together, and each forward is timed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.methods.common.draft_scorer import DraftRound, DraftScorer, NoForward, RoundDrafter, is_worth_a_forward
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest
from hf_specdec.methods.common.node_logits import NodeLogits

SHORT = 16  # tokens of a text that a forward reads with a request in about the time of the request alone


@dataclass(slots=True)
class DraftForwards:
    """Times of a draft network's forwards of one step.

    Attributes:
        seconds (`float`): of all of them.
        usual_seconds (`float`): of those that had next to nothing of a text to read.
        usual_cost (`float`): what these were taken to cost, in forwards of the target.
    """

    seconds: float = 0.0
    usual_seconds: float = 0.0
    usual_cost: float = 0.0

    def add(self, seconds: float, relative_cost: float, num_unread: int) -> None:
        """Count a forward that first read so many tokens of a text."""
        self.seconds += seconds
        if num_unread < SHORT and relative_cost:
            self.usual_seconds += seconds
            self.usual_cost += relative_cost


def propose_together(
    wanted: Sequence[tuple[BaseDrafter, DraftRequest] | None],
    draft_runner: BaseDraftRunner | None,
    forwards: DraftForwards | None = None,
) -> list[DraftTree | None]:
    """Get every drafter's tree. Those that ask a draft model are asked in turns, so that one forward answers all.

    Args:
        wanted: for each row left its drafter and request, `None` where its text has ended.
        forwards: counts those of the draft model.
    """
    if draft_runner is None:
        return [None if row is None else row[0].draft_for(row[1]) for row in wanted]
    room = draft_runner.room()
    trees: list[DraftTree | None] = [None] * len(wanted)
    rounds: list[DraftRound | None] = [None] * len(wanted)
    answers: list[Any] = [None] * len(wanted)  # the first thing sent to a generator is nothing
    for place, row in enumerate(wanted):
        if row is not None:
            drafter, request = row
            if isinstance(drafter, RoundDrafter):
                rounds[place] = drafter.grow(request if request.budget <= room else replace(request, budget=0))
            else:  # `auto` without a compiled core
                trees[place] = drafter.draft_for(request)
    drafters = [row[0] if row is not None and isinstance(row[0], RoundDrafter) else None for row in wanted]
    live = [drafter for drafter in drafters if drafter is not None]
    while any(rounds):
        requests: list[DraftTree | None] = [None] * len(wanted)
        for place, round_ in enumerate(rounds):
            if round_ is None:
                continue
            try:
                answer = answers[place]
                requests[place] = round_.throw(NoForward) if answer is NoForward else round_.send(answer)
            except StopIteration as finished:
                trees[place], rounds[place] = finished.value, None
        asking = [drafter for drafter, asked in zip(drafters, requests, strict=True) if drafter and asked]
        if not asking:
            continue
        if is_worth_a_forward(asking, live):
            scorers = [drafter.scorer for drafter in live if drafter.scorer is not None]
            answers = list(_timed(draft_runner, requests, scorers, forwards))
        else:
            answers = [NoForward] * len(wanted)  # an instance's traceback would hold this frame, which holds it
    return trees


def _timed(
    draft_runner: BaseDraftRunner,
    requests: Sequence[DraftTree | None],
    scorers: Sequence[DraftScorer],
    forwards: DraftForwards | None,
) -> list[NodeLogits]:
    """The answers to `requests`; what they take counts, what an accelerator computes for them too."""
    relative_cost, num_unread = max(s.relative_cost for s in scorers), max(s.num_unread for s in scorers)
    start = time.perf_counter()
    answers = draft_runner.score(requests)
    if forwards is not None:
        if any(answer.logits.is_cuda for answer in answers):
            torch.cuda.synchronize()  # drafters read the answers next in any case
        forwards.add(time.perf_counter() - start, relative_cost, num_unread)
    return answers
