"""What the runners of all draft heads share: each row's text, its scorer, and logits over the target's tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, cast

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.forward.draft_runner import RowScorer
from hf_specdec.methods.draft_head import DraftHead
from hf_specdec.observer import Source
from hf_specdec.tree import DraftTree

__all__ = ["BaseHeadRunner"]


class BaseHeadRunner(ABC):
    """A draft head with the texts of all rows; the same to drafters and the engine as a `DraftRunner`.

    Args:
        prompts: each row's prompt, without padding.
        hidden_layers: the hidden states of the target that the head reads.
        vocab_size (`int`): of the target's logits.
        relative_cost (`float`): a forward of the head over one of the target, roughly.
        device: where the logits go.
        is_shared (`bool`): whether its forwards are collectives of several processes.

    Attributes:
        texts (`list[list[int]]`): the rows' tokens, without padding.
    """

    takes_trees = True
    reads_prompt = True

    def __init__(
        self,
        head: DraftHead,
        prompts: Sequence[Sequence[int]],
        *,
        hidden_layers: Sequence[int],
        vocab_size: int,
        relative_cost: float,
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        self.hidden_layers = tuple(hidden_layers)
        self.vocab_size, self.relative_cost, self.device = vocab_size, relative_cost, device
        self.is_shared, self.rank_sync = is_shared, RankSync()
        self.source = cast("Source", head.methods[0])
        self.texts = [list(prompt) for prompt in prompts]
        self._scorers: list[RowScorer | None] = [None] * len(self.texts)
        self._target_ids = None if head.target_ids is None else head.target_ids.to(device)
        self._num_scored = [0] * len(self.texts)  # nodes of each row's tree in this round
        self._has_ended = False

    @property
    def num_rows(self) -> int:
        """Rows left."""
        return len(self.texts)

    def row(self, index: int) -> RowScorer:
        """The head as the drafter of row `index` sees it."""
        scorer = self._scorers[index] = RowScorer(self, index)
        return scorer

    def room(self) -> int:
        """How many tokens may be drafted below the root: rotary positions have no end."""
        return 1 << 30

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """For each row left, `(new nodes, target's vocab_size)` fp32 logits of the nodes not yet scored."""
        self.rank_sync.score(trees)
        self._end_round()
        with self.rank_sync.forward():
            rows = [self._like_the_targets(found) for found in self._score(trees)]
        for place, tree in enumerate(trees):
            if tree is not None:
                self._num_scored[place] = len(tree)
        return rows

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on."""
        self.texts[place] += accepted
        self._has_ended = True

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""
        self._end_round()
        self._select(rows)
        self.texts = [self.texts[row] for row in rows]
        self._scorers = [self._scorers[row] for row in rows]
        self._renew_scorers()

    def pause(self, places: Sequence[int], *, ahead: int) -> None:
        """Rows whose texts have ended ask for nothing, and nothing waits for them."""
        return

    def admit(self, other: Self, place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""
        self._end_round()
        other._end_round()
        self._admit(other, place)
        at = len(self.texts) if place is None else place
        self.texts[at : at + 1] = other.texts
        self._scorers[at : at + 1] = other._scorers
        self._renew_scorers()

    @abstractmethod
    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's states of the text's next tokens, `(n, target_hidden_size)` for each of `hidden_layers`.

        The first call brings those of the prompt's last tokens, padding in front of them.
        """

    @abstractmethod
    def _score(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """As `score`, `(new nodes, draft_vocab_size)` of the head's own logits."""

    @abstractmethod
    def _renew_round(self) -> None:
        """A round has ended: keep what it computed of the text, forget its tree."""

    @abstractmethod
    def _select(self, rows: Sequence[int]) -> None:
        """As `select`, of what the runner holds besides the texts."""

    @abstractmethod
    def _admit(self, other: Self, place: int | None) -> None:
        """As `admit`, of what the runner holds besides the texts."""

    @staticmethod
    def _next_nodes(known: int, tree: DraftTree | None) -> range:
        """The nodes that can be computed after the first `known` ones: the root, or those whose parents are known.

        They are the next ones, so that rows of logits stand in the order of the nodes.
        """
        if tree is None or known == 0:
            return range(known, known if tree is None else 1)
        end = known
        while end < len(tree) and tree.parents[end] < known:
            end += 1
        return range(known, end)

    def _end_round(self) -> None:
        if self._has_ended:
            self._has_ended = False
            self._renew_round()
            self._num_scored = [0] * len(self.texts)

    def _renew_scorers(self) -> None:
        self._num_scored = [0] * len(self.texts)
        for place, scorer in enumerate(self._scorers):
            if scorer is not None:
                scorer.draft_model, scorer.place = self, place

    def _like_the_targets(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 on the target's device over all of its tokens; those that the head cannot draft are impossible."""
        rows = rows.to(device=self.device, dtype=torch.float32)
        if self._target_ids is None and rows.shape[1] == self.vocab_size:
            return rows
        full: torch.Tensor = torch.full((len(rows), self.vocab_size), float("-inf"), device=self.device)
        if self._target_ids is not None:
            return full.index_copy_(1, self._target_ids, rows)
        width = min(rows.shape[1], self.vocab_size)
        full[:, :width] = rows[:, :width]
        return full
