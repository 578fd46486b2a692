"""Base of the runners of draft models and heads, one of their rows as drafters see it, and drafting with any of them.

The drafters of all rows are asked together, and each forward is timed.
"""

import contextlib
import itertools
import sys
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.methods.common.draft_scorer import DraftRound, DraftScorer, NoForward, RoundDrafter, is_worth_a_forward
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest
from hf_specdec.methods.common.node_logits import NodeLogits

Around = Callable[[Sequence[DraftTree | None] | None], AbstractContextManager[None]]
SHORT = 16  # tokens of a text that a forward reads with a request in about the time of the request alone


class RowScorer:
    """One row of a draft model or head: the `DraftScorer` of a drafter.

    Runners know their scorers by weak references: what a call has allocated is freed with it, not by the collector.
    """

    def __init__(self, draft_runner: "BaseDraftRunner", place: int) -> None:
        self.draft_runner, self.place = draft_runner, place
        self.vocab_size = draft_runner.vocab_size
        self.takes_trees = draft_runner.takes_trees
        self.max_draft_len = draft_runner.max_draft_len
        self.source = draft_runner.source

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The draft model has the call's prompt already, padding included."""

    def score(self, tree: DraftTree) -> NodeLogits:
        """See `DraftScorer.score`."""
        trees: list[DraftTree | None] = [None] * self.draft_runner.num_rows
        trees[self.place] = tree
        return self.draft_runner.score(trees)[self.place]

    def room(self) -> int:
        """See `DraftScorer.room`."""
        return self.draft_runner.room()

    @property
    def relative_cost(self) -> float:
        """See `DraftScorer`."""
        return self.draft_runner.cost_of_request(self.place)

    @property
    def num_unread(self) -> int:
        """See `DraftScorer`."""
        return self.draft_runner.num_unread(self.place)

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """See `DraftScorer.keep`."""
        self.draft_runner.keep(self.place, accepted)


KnownScorer = Callable[[], RowScorer | None]


def unknown_scorer() -> None:
    """Takes the place of a scorer that has not been asked for."""
    return


def network_of(module: torch.nn.Module) -> Hashable:
    """Names a network that drafts: neither a copy's name, nor that of one that takes its place in memory."""
    return id(module), module.__dict__.setdefault("_hf_specdec_network", uuid.uuid4().hex)


class BaseDraftRunner(ABC):
    """A network that drafts, as drafters and the engine see it; here with no text to read or to release.

    Args:
        num_rows (`int`): rows of the call.
        is_shared (`bool`): whether its forwards are collectives of several processes.

    Attributes:
        vocab_size (`int`): of the target.
        relative_cost (`float`): of a forward, in forwards of the target.
        hidden_layers (`tuple[int, ...]`): hidden states of the target that it reads; none for a model of its own.
        takes_trees (`bool`): whether siblings can be scored.
        max_draft_len (`int`): levels of a tree that it can draft.
        around: entered around its forwards, with the trees to be scored or, where it reads texts, `None`.
        source (`str`): what `spec_observer` is told of where its drafts come from.
        compiled (`CompiledForward`, *optional*): runs its forwards; `None` where they run as they are written.
        network (`Hashable`): the same for runners whose rows can be computed together.
    """

    hidden_layers: tuple[int, ...] = ()
    takes_trees = True
    max_draft_len = sys.maxsize
    compiled: CompiledForward | None = None
    vocab_size: int
    relative_cost: float
    source: str
    network: Hashable

    def __init__(self, num_rows: int, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.around: Around = lambda trees: contextlib.nullcontext()
        self._scorers: list[KnownScorer] = [unknown_scorer] * num_rows

    @property
    def num_rows(self) -> int:
        """Rows left."""
        return len(self._scorers)

    def row(self, index: int) -> RowScorer:
        """As the drafter of row `index` sees it."""
        scorer = RowScorer(self, index)
        self._scorers[index] = weakref.ref(scorer)
        return scorer

    @abstractmethod
    def room(self) -> int:
        """Number of tokens that may be drafted below the root."""

    def score(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """For each row left the fp32 logits of its nodes not yet scored, over the target's vocabulary."""
        with self.around(trees):
            return self._answers(trees)

    @abstractmethod
    def _answers(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """As `score`, in this process."""

    def cost_of_request(self, place: int) -> float:
        """Cost of a row's next request, in forwards of the target."""
        return self.relative_cost

    def num_unread(self, place: int) -> int:
        """Tokens of a row's text before the last that the next request has to read first."""
        return 0

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's `hidden_layers` states of the text's next tokens."""
        return

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on."""
        return

    def close(self) -> None:
        """The call has ended."""
        return

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""
        self._scorers = [self._scorers[row] for row in rows]
        self._place_scorers()
        self._forget_round()

    def admit(self, other: Self, place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""
        at = self.num_rows if place is None else place
        self._scorers[at : at + 1] = other._scorers
        self._place_scorers()
        self._forget_round()

    @abstractmethod
    def _forget_round(self) -> None:
        """Nothing is scored of this round."""

    def _place_scorers(self) -> None:
        """Tell every scorer whose row it is."""
        for place, known in enumerate(self._scorers):
            if (scorer := known()) is not None:
                scorer.draft_runner, scorer.place = self, place


def of_each_row(logits: torch.Tensor, counts: Iterable[int]) -> list[NodeLogits]:
    """The rows' parts of `(nodes of all rows, vocab_size)`, so many nodes each; what one reads is read for all."""
    whole, ends = NodeLogits(logits), list(itertools.accumulate(counts, initial=0))
    return [whole.part(slice(*own)) for own in itertools.pairwise(ends)]


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
