"""The decoding loop of every method: propose, forward, verify, commit, stop check.

Knows neither methods nor models: a `Drafter` proposes, a `ModelRunner` computes, a `Sampler` and a `StopCheck` decide.
A batch is several rows, each with its own text, drafter and chooser; one forward serves them all.

    loop = SpecLoop(target, rows, limits, stats)
    loop.run()
    rows[0].text.emitted, loop.stats
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.budget import Budget
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.errors import ConfigError
from hf_specdec.forward.draft_runner import DraftRunner, propose_together
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.observer import SpecStep
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree, ExtraTokens

__all__ = ["Limits", "SpecLoop"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step.

    Attributes:
        budget (`int`): most drafted tokens a step.
        max_positions (`int | None`): positions the model has; drafts never reach beyond them.
        vocab_size (`int | None`): tokens the model knows; drafted ids beyond them are left out.
        pad_token_id (`int`): stands behind rows that end before others.
    """

    budget: int
    max_positions: int | None = None
    vocab_size: int | None = None
    pad_token_id: int = 0


class SpecLoop:
    """Decodes all rows to their ends.

    Args:
        draft_model: the draft model of the call, if its drafters have one.
        budget: decides how much of the drafts is verified; without one, all of it.
        streamer: a transformers streamer that has seen the prompt already; for one row.
        observer: called with a `SpecStep` for every row after every verify step.
        keep_hidden_states (`bool`): collect the hidden states of every emitted token; for one row.
        agreement: of the processes that decode together; by default this one is alone.
    """

    _observer_seconds: float = 0.0

    def __init__(
        self,
        target: ModelRunner,
        rows: Sequence[SequenceState],
        limits: Limits,
        stats: SpecStats,
        *,
        draft_model: DraftRunner | None = None,
        budget: Budget | None = None,
        streamer: Any = None,
        observer: Callable[[SpecStep], None] | None = None,
        keep_hidden_states: bool = False,
        rank_sync: RankSync | None = None,
    ) -> None:
        self.target, self.rows, self.limits, self.stats = target, rows, limits, stats
        self.draft_model, self.streamer, self.observer = draft_model, streamer, observer
        self.budget = budget
        self.hidden_states: list[tuple[torch.Tensor, ...]] | None = [] if keep_hidden_states else None
        self.rank_sync = rank_sync or RankSync()
        self._active = list(rows)  # one for each row of the target
        self._whole_prompt = False

    def run(self) -> None:
        """Prompt, then steps until every text ends. Whatever happens, the cache is left holding the text."""
        try:
            self._prompt()
            while not all(row.finished for row in self._active):
                self._retire()
                self._step()
            self.rank_sync.settle()
            self._pad(self.length)
            if self.target.keep_cache:
                self.target.catch_up(self.length)
        except BaseException as error:
            self.rank_sync.abandon(error)
            raise
        finally:
            try:
                self._end_drafters()
            finally:
                self.target.close()

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(row.length for row in self.rows)

    @property
    def _num_live(self) -> int:
        """Rows whose texts go on."""
        return sum(not row.finished for row in self._active)

    def _prompt(self) -> None:
        start = time.perf_counter()
        with self.rank_sync.forward():
            logits = self.target.prefill().logits[:, -1:]
        self.stats.prefill_seconds = time.perf_counter() - start
        self._whole_prompt = True
        for index, row in enumerate(self.rows):
            row.sampler.load(logits[index], row.tree)
            row.emit(0, self._heard)
        self._whole_prompt = False
        start = time.perf_counter()
        for index, row in enumerate(self.rows):
            self._begin(row, index, logits[index], self.draft_model)
        self.stats.draft_seconds += time.perf_counter() - start

    def _step(self) -> None:
        if self.budget is not None:
            self._set_draft_cost(self.budget)
        began = time.perf_counter()
        trees = self.rank_sync.trees(self._draft, self.draft_model)
        drafted = time.perf_counter()
        num_live = self._num_live
        with self.rank_sync.forward():
            logits = self.target.forward(trees)
        for row, tree, rows in zip(self._active, trees, logits, strict=True):
            row.sampler.load(rows, tree)
        verified = time.perf_counter()
        verdicts = self._verify(trees)
        committed = time.perf_counter()
        self._observe(trees, logits, verdicts)
        observed = time.perf_counter()
        self.stats.draft_seconds += drafted - began + observed - committed
        self.stats.verify_seconds += verified - drafted
        self.stats.commit_seconds += committed - verified
        self.stats.num_forwards += 1
        for row, tree, result in zip(self._active, trees, verdicts, strict=True):
            if result.tokens:
                row.stats.record_step(tree.num_draft_tokens, result.num_accepted)
                if tree.probabilities is not None:
                    row.stats.record_predictions(tree.predictions(result.path, result.tokens))
        if self.budget is not None:
            drafting = drafted - began + observed - committed
            num_tokens = sum(len(result.tokens) for result in verdicts)
            rest = observed - began - drafting
            self.budget.record(trees, num_live, num_tokens=num_tokens, seconds=rest, draft_seconds=drafting)
        if self.observer is not None:
            seconds = drafted - began + observed - committed, verified - drafted, committed - verified
            began = time.perf_counter()
            self.rank_sync.attempt(self._show, trees, verdicts, seconds)
            self._observer_seconds += time.perf_counter() - began

    def _begin(self, row: SequenceState, place: int, logits: torch.Tensor, draft_model: DraftRunner | None) -> None:
        """The prompt is read and its first token chosen: the drafter begins, where drafts are made."""
        token = row.text.tokens[-1]
        if self.rank_sync.is_leader:
            row.begin(token, logits)
        elif draft_model is not None and row.prompt:
            draft_model.keep(place, [token])

    def _observe(
        self, trees: Sequence[DraftTree], logits: Sequence[torch.Tensor], verdicts: Sequence[VerifyResult]
    ) -> None:
        """Tell every row's drafter what became of its tree; where none is made, the draft model at least."""
        for place, (row, tree, rows, result) in enumerate(zip(self._active, trees, logits, verdicts, strict=True)):
            if not result.tokens:
                continue
            if self.rank_sync.is_leader:
                row.drafter.observe(tree, rows if row.drafter.needs_logits else None, result.tokens)
            elif self.draft_model is not None:
                self.draft_model.keep(place, result.tokens)

    def _set_draft_cost(self, budget: Budget) -> None:
        """Let the drafters know what drafts have to gain."""
        lengths = [(row.stop_check.max_length, len(row.text)) for row in self._active if not row.finished]
        tokens_left = max([0 if most is None else most - length for most, length in lengths], default=0)
        cost = budget.draft_cost(len(self._active), self._num_live, tokens_left)
        for row in self._active:
            row.drafter.draft_cost = cost

    def _draft(self) -> list[DraftTree]:
        """The drafters' trees, cut to what the model can verify and what the texts have room for."""
        budget, is_chain = self.limits.budget, self.target.tier == "chain"
        room = self._room()
        depths = [self._depth(index, row, room) for index, row in enumerate(self._active)]
        wanted = [
            None if row.finished else (row.drafter, min(budget, depth) if is_chain else budget)
            for row, depth in zip(self._active, depths, strict=True)
        ]
        trees = [
            DraftTree.chain(row.text.tokens[-1]) if tree is None else self._cut(tree, row, depth)
            for row, tree, depth in zip(self._active, propose_together(wanted, self.draft_model), depths, strict=True)
        ]
        return trees if self.budget is None else self.budget.cut(trees, self._num_live)

    def _cut(self, tree: DraftTree, row: SequenceState, depth: int) -> DraftTree:
        if tree.tokens[0] != row.text.tokens[-1]:
            raise ConfigError(
                "tree.tokens[0]", "must be the last token of the text", tree.tokens[0], "Build the tree on that root."
            )
        if min(tree.tokens) < 0:
            remedy = "Draft token ids of the target's vocabulary."
            raise ConfigError("tree.tokens", "must be at least 0", min(tree.tokens), remedy)
        if self.target.tier == "chain" and not (tree.is_chain and tree.extra is None):
            tree = tree.chained()
        if tree.extra is not None and not self._fits(tree.extra):
            tree = tree.with_extra(None)
        return tree.truncated(max_depth=depth, max_nodes=self.limits.budget, vocab_size=self.limits.vocab_size)

    def _fits(self, extra: ExtraTokens) -> bool:
        """Whether the model has positions and embeddings for all extra tokens."""
        positions, vocab_size = self.limits.max_positions, self.limits.vocab_size
        deepest, largest = max(extra.depths, default=0), max(extra.tokens, default=0)
        return (positions is None or self.target.position + deepest < positions) and (
            vocab_size is None or largest < vocab_size
        )

    def _room(self) -> int:
        """Most tokens that may be drafted one under the other: the one after the last of them must still fit."""
        budget, positions = self.limits.budget, self.limits.max_positions
        return budget if positions is None else min(budget, positions - 1 - self.target.position)

    def _depth(self, index: int, row: SequenceState, room: int) -> int:
        """How many of the `room` tokens are worth drafting for one row."""
        if row.stop_check.max_length is not None:
            room = min(room, row.stop_check.max_length - len(row.text) - 1)
        return room if room > 0 and self.target.drafts_now(index) else 0

    def _verify(self, trees: Sequence[DraftTree]) -> list[VerifyResult]:
        """Choose every row's tokens, then keep what was accepted; after an error, what was chosen before it."""
        verdicts: list[VerifyResult] = []
        try:
            for row, tree in zip(self._active, trees, strict=True):
                verdicts.append(VerifyResult([], []) if row.finished else self._verdict(row, tree))
        except BaseException:
            paths = [result.path for result in verdicts] + [self._active[len(verdicts)].visited]
            self.target.commit(paths + [[0]] * (len(trees) - len(paths)))
            raise
        self.target.commit([result.path for result in verdicts])
        return verdicts

    def _verdict(self, row: SequenceState, tree: DraftTree) -> VerifyResult:
        """Choose one row's tokens."""
        return row.verify(tree, self._heard)

    def _heard(self, row: SequenceState, node: int, token: int) -> None:
        """Tell everyone who listens of an emitted token."""
        if self.hidden_states is not None:
            states = self.target.hidden_states(row=0, node=None if self._whole_prompt else node)
            self.hidden_states.append(states)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        row.stats.num_tokens += 1

    def _retire(self) -> None:
        """Take finished rows out of the batch; where they cannot leave it, they go on with padding."""
        if not any(row.finished for row in self._active):
            return
        if self.target.supports_row_removal:
            kept = [index for index, row in enumerate(self._active) if not row.finished]
            self.target.select(kept)
            if self.draft_model is not None:
                self.draft_model.select(kept)
            self._active = [self._active[index] for index in kept]
        else:
            self._pad(self._resting_length())
            if self.draft_model is not None:
                resting = [place for place, row in enumerate(self._active) if row.finished]
                self.draft_model.rest(resting, ahead=self.limits.budget + 1)

    def _resting_length(self) -> int:
        """How long finished rows are with their padding: in step they go ahead, so that nobody waits for them."""
        longest = max(row.length for row in self._active)
        if not self.target.lockstep:
            return longest
        ahead, positions = longest + self.limits.budget + 1, self.limits.max_positions
        return ahead if positions is None else max(longest, min(ahead, self.target.most_tokens(positions)))

    def _pad(self, length: int) -> None:
        for row in self.rows:
            if row.finished:
                row.pad(length, self.limits.pad_token_id)

    def _end_drafters(self) -> None:
        """End every drafter, also when one of them complains."""
        error: BaseException | None = None
        for row in self.rows:
            try:
                row.end()
            except BaseException as raised:  # noqa: BLE001 - raised again below
                error = error or raised
        if error is not None:
            raise error

    def _show(
        self, trees: Sequence[DraftTree], verdicts: Sequence[VerifyResult], seconds: tuple[float, float, float]
    ) -> None:
        assert self.observer is not None
        for row, tree, result in zip(self._active, trees, verdicts, strict=True):
            if result.tokens:
                self.observer(
                    SpecStep(
                        index=self.stats.num_forwards - 1,
                        tree=tree,
                        accepted=tuple(result.tokens),
                        path=tuple(result.path),
                        draft_seconds=seconds[0],
                        verify_seconds=seconds[1],
                        commit_seconds=seconds[2],
                        row=row.index,
                        view=row.drafter.view,
                        nodes=row.drafter.describe(tree) if self.rank_sync.is_leader else (),
                        observer_seconds=self._observer_seconds,
                    )
                )
