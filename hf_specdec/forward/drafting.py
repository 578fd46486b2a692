"""Drafting with a network of any kind: what the engine asks of it, its rows as drafters see them, all rows together."""

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.draft_scorer import DraftRound, DraftScorer, RoundDrafter
from hf_specdec.methods.node_logits import NodeLogits
from hf_specdec.observer import Source
from hf_specdec.tree import DraftTree

__all__ = [
    "AnyDraftRunner",
    "DraftForwards",
    "KnownScorer",
    "RowScorer",
    "of_each_row",
    "propose_together",
    "unknown_scorer",
    "used_by",
]

SHORT = 16  # tokens of a text that a forward reads beside a request in about the time of the request alone


class AnyDraftRunner(Protocol):
    """What drafts with a network, as drafters and the engine see it.

    Attributes:
        hidden_layers: hidden states of the target that it reads; none for a model of its own.
        reads_prompt (`bool`): whether it has positions for the prompt; where not, nothing is ever scored.
        is_shared (`bool`): whether its forwards are collectives of several processes.
        source (`str`): what `spec_observer` is told of where its drafts come from.
        compiled: runs its forwards; `None` where they run as they are written.
    """

    vocab_size: int
    relative_cost: float
    hidden_layers: tuple[int, ...]
    reads_prompt: bool
    is_shared: bool
    rank_sync: RankSync
    source: Source
    compiled: CompiledForward | None

    @property
    def network(self) -> Hashable:
        """The same for runners whose rows can be computed together."""

    @property
    def takes_trees(self) -> bool:
        """Whether siblings can be scored."""

    @property
    def num_rows(self) -> int:
        """Rows left."""

    def row(self, index: int) -> "RowScorer":
        """As the drafter of row `index` sees it."""

    def room(self) -> int:
        """How many tokens may be drafted below the root."""

    def num_unread(self, place: int) -> int:
        """Tokens of a row's text before the last that the next request has to read first."""

    def num_skippable(self, place: int) -> int:
        """How many of these, the first ones, may be left out by `skip`."""

    def skip(self, place: int, count: int) -> None:
        """Never read the first `count` unread tokens of a row."""

    def score(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """For each row left the fp32 logits of its nodes not yet scored, over the target's vocabulary."""

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's `hidden_layers` states of the text's next tokens."""

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""

    def pause(self, places: Sequence[int], *, ahead: int) -> None:
        """The texts of these rows have ended and stay in the batch."""

    def close(self) -> None:
        """The call has ended."""

    def admit(self, other: Any, place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""


class RowScorer:
    """One row of a draft model or head: the `DraftScorer` of a drafter.

    Runners know their scorers by weak references: what a call has allocated is freed with it, not by the collector.
    """

    def __init__(self, draft_model: AnyDraftRunner, place: int) -> None:
        self.draft_model, self.place = draft_model, place
        self.vocab_size = draft_model.vocab_size
        self.takes_trees = draft_model.takes_trees
        self.relative_cost = draft_model.relative_cost
        self.source = draft_model.source

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The draft model has the call's prompt already, padding included."""

    def score(self, tree: DraftTree) -> NodeLogits:
        """See `DraftScorer.score`."""
        trees: list[DraftTree | None] = [None] * self.draft_model.num_rows
        trees[self.place] = tree
        return self.draft_model.score(trees)[self.place]

    def room(self) -> int:
        """See `DraftScorer.room`."""
        return self.draft_model.room()

    @property
    def num_unread(self) -> int:
        """See `DraftScorer`."""
        return self.draft_model.num_unread(self.place)

    @property
    def num_skippable(self) -> int:
        """See `DraftScorer`; none where other processes compute with it, which would read them all."""
        return 0 if self.draft_model.is_shared else self.draft_model.num_skippable(self.place)

    def skip(self, count: int) -> None:
        """See `DraftScorer.skip`."""
        self.draft_model.skip(self.place, count)

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """See `DraftScorer.keep`."""
        self.draft_model.keep(self.place, accepted)


KnownScorer = Callable[[], RowScorer | None]


def unknown_scorer() -> None:
    """In the place of a scorer that nobody has asked for."""
    return


def used_by(rank_sync: RankSync, draft_model: AnyDraftRunner | None) -> AnyDraftRunner | None:
    """The draft model where this process computes with it: everywhere if it is shared, else where drafts are made."""
    if draft_model is None:
        return None
    if draft_model.is_shared:
        draft_model.rank_sync = rank_sync
        return draft_model
    return draft_model if rank_sync.is_leader else None


def of_each_row(logits: torch.Tensor, counts: Iterable[int]) -> list[NodeLogits]:
    """The rows' parts of `(nodes of all rows, vocab_size)`, so many nodes each; what one reads is read for all."""
    whole, ends = NodeLogits(logits), list(itertools.accumulate(counts, initial=0))
    return [whole.part(slice(*own)) for own in itertools.pairwise(ends)]


@dataclass(slots=True)
class DraftForwards:
    """What a draft network's forwards of one step took.

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
    wanted: Sequence[tuple[Drafter, int] | None],
    draft_model: AnyDraftRunner | None,
    forwards: DraftForwards | None = None,
) -> list[DraftTree | None]:
    """Every drafter's tree. Those that ask a draft model are asked in turns, so that one forward answers all.

    Args:
        wanted: for each row left its drafter and budget, `None` where its text has ended.
        forwards: counts those of the draft model.
    """
    if draft_model is None:
        return [None if row is None else row[0].propose(row[1]) for row in wanted]
    room = draft_model.room()
    trees: list[DraftTree | None] = [None] * len(wanted)
    rounds: list[DraftRound | None] = [None] * len(wanted)
    answers: list[Any] = [None] * len(wanted)  # the first thing sent to a generator is nothing
    for place, row in enumerate(wanted):
        if row is not None:
            drafter, budget = row
            assert isinstance(drafter, RoundDrafter)
            rounds[place] = drafter.grow(budget if budget <= room else 0)
    while any(rounds):
        requests: list[DraftTree | None] = [None] * len(wanted)
        for place, round_ in enumerate(rounds):
            if round_ is None:
                continue
            try:
                requests[place] = round_.send(answers[place])
            except StopIteration as finished:
                trees[place], rounds[place] = finished.value, None
        if any(requests):
            scorers = [cast("RoundDrafter", row[0]).scorer for row in wanted if row is not None]
            answers = list(_timed(draft_model, requests, [scorer for scorer in scorers if scorer], forwards))
    return trees


def _timed(
    draft_model: AnyDraftRunner,
    requests: Sequence[DraftTree | None],
    scorers: Sequence[DraftScorer],
    forwards: DraftForwards | None,
) -> list[NodeLogits]:
    """The answers to `requests`; what they take counts, what an accelerator computes for them too."""
    relative_cost, num_unread = max(s.relative_cost for s in scorers), max(s.num_unread for s in scorers)
    start = time.perf_counter()
    answers = draft_model.score(requests)
    if forwards is not None:
        if any(answer.logits.is_cuda for answer in answers):
            torch.cuda.synchronize()  # drafters read the answers next in any case
        forwards.add(time.perf_counter() - start, relative_cost, num_unread)
    return answers
