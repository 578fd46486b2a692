"""What the runners of draft models, of first layers and of heads share: the scorers of all rows, by their places."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.forward.drafting import KnownScorer, RowScorer, unknown_scorer
from hf_specdec.methods.node_logits import NodeLogits
from hf_specdec.observer import Source
from hf_specdec.tree import DraftTree

__all__ = ["BaseDraftRunner"]


class BaseDraftRunner(ABC):
    """Base class of `AnyDraftRunner`s. As it stands it reads no text, and so has nothing to leave out or to release.

    Args:
        num_rows (`int`): rows of the call.
        is_shared (`bool`): whether its forwards are collectives of several processes.

    Attributes:
        rank_sync (`RankSync`): of these processes.
    """

    scorer_class: ClassVar[type[RowScorer]] = RowScorer
    hidden_layers: tuple[int, ...] = ()
    reads_prompt = True
    takes_trees = True
    compiled: CompiledForward | None = None
    vocab_size: int
    relative_cost: float
    source: Source
    network: Hashable

    def __init__(self, num_rows: int, *, is_shared: bool) -> None:
        self.is_shared, self.rank_sync = is_shared, RankSync()
        self._scorers: list[KnownScorer] = [unknown_scorer] * num_rows

    @property
    def num_rows(self) -> int:
        """Rows left."""
        return len(self._scorers)

    def row(self, index: int) -> RowScorer:
        """As the drafter of row `index` sees it."""
        scorer = self.scorer_class(self, index)
        self._scorers[index] = weakref.ref(scorer)
        return scorer

    @abstractmethod
    def room(self) -> int:
        """See `AnyDraftRunner.room`."""

    @abstractmethod
    def score(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """See `AnyDraftRunner.score`."""

    def num_unread(self, place: int) -> int:
        """See `AnyDraftRunner.num_unread`."""
        return 0

    def num_skippable(self, place: int) -> int:
        """See `AnyDraftRunner.num_skippable`."""
        return 0

    def skip(self, place: int, count: int) -> None:
        """See `AnyDraftRunner.skip`."""
        return

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """See `AnyDraftRunner.read`."""
        return

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """See `AnyDraftRunner.keep`."""
        return

    def pause(self, places: Sequence[int], *, ahead: int) -> None:
        """See `AnyDraftRunner.pause`."""
        return

    def close(self) -> None:
        """See `AnyDraftRunner.close`."""
        return

    def select(self, rows: Sequence[int]) -> None:
        """See `AnyDraftRunner.select`."""
        self._scorers = [self._scorers[row] for row in rows]
        self._place_scorers()
        self._forget_round()

    def admit(self, other: Self, place: int | None) -> None:
        """See `AnyDraftRunner.admit`."""
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
                scorer.draft_model, scorer.place = self, place
