"""One verify step of a batch: propose, forward, verify, commit, observe.

Knows neither methods nor models: a `Drafter` proposes, a `ModelRunner` computes, a `Sampler` and a `StopCheck` decide.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.budget import Budget
from hf_specdec.engine.sequence import OnToken, SequenceState
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.forward.drafting import AnyDraftRunner, propose_together
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.node_outputs import NodeOutputs
from hf_specdec.methods.node_logits import LogitsRead, NodeLogits
from hf_specdec.observer import SpecStep
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree, ExtraTokens

__all__ = ["Batch", "Limits", "StepRunner"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step.

    Attributes:
        budget (`int`): most drafted tokens a step.
        max_positions (`int | None`): positions the model has; drafts never reach beyond them.
        vocab_size (`int | None`): tokens the model knows; drafted ids beyond them are left out.
        pad_token_id (`int`): follows sequences that end before others.
    """

    budget: int
    max_positions: int | None = None
    vocab_size: int | None = None
    pad_token_id: int = 0


@dataclass(slots=True)
class Batch:
    """Sequences decoded together; the one at place i is row i of the target and of the draft model."""

    sequences: list[SequenceState]
    target: ModelRunner
    limits: Limits
    draft_model: AnyDraftRunner | None = None

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return sum(not sequence.finished for sequence in self.sequences)

    def select(self, places: Sequence[int]) -> None:
        """Go on with the sequences at these places only."""
        self.target.select(places)
        if self.draft_model is not None:
            self.draft_model.select(places)
        self.sequences = [self.sequences[place] for place in places]

    def admit(self, other: "Batch", place: int | None) -> None:
        """Take over the one sequence of `other`, whose prompt is read, in `place` or after the last."""
        self.target.admit(other.target, place)
        if self.draft_model is not None and other.draft_model is not None:
            self.draft_model.admit(other.draft_model, place)
        self.limits = replace(self.limits, budget=max(self.limits.budget, other.limits.budget))
        at = len(self.sequences) if place is None else place
        self.sequences[at : at + 1] = other.sequences

    def close(self, *left: SequenceState) -> None:
        """End the drafters, those of sequences that have `left` too, and free the caches, also where one raises."""
        with contextlib.ExitStack() as stack:  # in reverse
            for network in (self.draft_model, self.target):
                if network is not None:
                    stack.callback(network.close)
            for sequence in (*reversed(self.sequences), *reversed(left)):
                stack.callback(sequence.end)

    def read(self, trees: Sequence[DraftTree]) -> list[NodeLogits]:
        """The last forward's logits, with one transfer of what samplers and drafters want of them."""
        counts = [count for sequence in self.sequences if (count := sequence.num_top_logits) is not None]
        for sequence, tree in zip(self.sequences, trees, strict=True):
            sequence.sampler.expect(tree)
        decides = any(not sequence.sampler.needs_rows for sequence in self.sequences)
        logits = self.target.node_logits(LogitsRead(max(counts, default=None), decides, self._choose_ahead))
        for sequence, rows in zip(self.sequences, logits, strict=True):
            sequence.sampler.load(rows)
        return logits

    def _choose_ahead(self, place: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        sequence = self.sequences[place]
        return None if sequence.finished else sequence.sampler.choose_ahead(logits, sequence.text)

    @property
    def compiled(self) -> list[CompiledForward]:
        """What runs the forwards of the target and of the draft model, where they are compiled."""
        found = [self.target.compiled, None if self.draft_model is None else self.draft_model.compiled]
        return [forward for place, forward in enumerate(found) if forward is not None and forward not in found[:place]]

    @property
    def compile_seconds(self) -> float:
        """What compiling has taken so far, that of earlier calls counted."""
        return sum(forward.seconds for forward in self.compiled)

    def max_depth(self) -> int:
        """Most tokens that may be drafted one under the other: the one after the last of them must still fit."""
        budget, positions = self.limits.budget, self.limits.max_positions
        room = self.target.draft_room
        budget = budget if room is None else min(budget, room)
        return budget if positions is None else min(budget, positions - 1 - self.target.position)

    def depths(self) -> list[int]:
        """How deep a draft of each sequence is worth while; 0 for none."""
        room = self.max_depth()
        return [self._depth(place, sequence, room) for place, sequence in enumerate(self.sequences)]

    def _depth(self, place: int, sequence: SequenceState, room: int) -> int:
        if sequence.stop_check.max_length is not None:
            room = min(room, sequence.stop_check.max_length - len(sequence.text) - 1)
        return room if room > 0 and self.target.drafts_now(place) else 0

    def fits(self, extra: ExtraTokens) -> bool:
        """Whether the model has positions and embeddings for all extra tokens."""
        positions, vocab_size = self.limits.max_positions, self.limits.vocab_size
        deepest, largest = max(extra.depths, default=0), max(extra.tokens, default=0)
        room = self.target.draft_room
        if room is not None and deepest > room:
            return False
        return (positions is None or self.target.position + deepest < positions) and (
            vocab_size is None or largest < vocab_size
        )


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Where a step's time went, all sequences together."""

    draft: float
    verify: float
    commit: float


class StepRunner:
    """Takes batches one step further.

    Args:
        stats: gets the forwards and seconds; each sequence has its own for tokens and drafts.
        budget: decides how much of the drafts is verified; without one, all of it.
        observer: called with a `SpecStep` for every sequence after every verify step.
        rank_sync: of the processes that decode together; by default this one is alone.
        on_token: called with the sequence, the node that decided and the token, for every token of a text.
    """

    def __init__(
        self,
        stats: SpecStats,
        *,
        budget: Budget | None = None,
        observer: Callable[[SpecStep], None] | None = None,
        rank_sync: RankSync | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        self.stats, self.budget, self.observer, self.on_token = stats, budget, observer, on_token
        self.rank_sync = rank_sync or RankSync()
        self._observer_seconds = self._compile_seconds = 0.0

    def begin(self, batch: Batch) -> None:
        """Read the prompts, choose every first token, then let the drafters begin."""
        start, self._compile_seconds = time.perf_counter(), batch.compile_seconds
        with self.rank_sync.forward():
            batch.target.prefill()
        read = time.perf_counter()
        logits = batch.read([sequence.tree for sequence in batch.sequences])
        for sequence in batch.sequences:
            sequence.emit(0, self.on_token)
        chosen = time.perf_counter()
        for place, sequence in enumerate(batch.sequences):
            outputs = NodeOutputs(logits[place], batch.target.prompt_states(place))
            if batch.draft_model is not None:
                batch.draft_model.read(place, outputs.hidden_states)
            if self.rank_sync.is_leader:
                sequence.begin(sequence.text.tokens[-1], outputs)
            elif batch.draft_model is not None and sequence.prompt:
                batch.draft_model.keep(place, sequence.text.tokens[-1:])
        self.stats.prefill_seconds += read - start
        self.stats.draft_seconds += time.perf_counter() - chosen

    def run(self, batch: Batch) -> None:
        """One step of all sequences that have not ended."""
        if self.budget is not None:
            self._set_draft_cost(batch, self.budget)
        began = time.perf_counter()
        trees = self.rank_sync.trees(lambda: self._propose(batch), batch.draft_model)
        drafted = time.perf_counter()
        num_live = batch.num_live
        outputs = self._forward(batch, trees)
        verified = time.perf_counter()
        results = self._verify(batch, trees)
        committed = time.perf_counter()
        self._observe(batch, trees, outputs, results)
        drafting = drafted - began + time.perf_counter() - committed
        seconds = _Seconds(drafting, verified - drafted, committed - verified)
        self._record(batch, trees, results, num_live, seconds)

    def _set_draft_cost(self, batch: Batch, budget: Budget) -> None:
        """Let the drafters know what drafts have to gain."""
        live = [sequence for sequence in batch.sequences if not sequence.finished]
        tokens_left = max((sequence.tokens_left for sequence in live), default=0)
        cost = budget.draft_cost(len(batch.sequences), len(live), tokens_left)
        for sequence in batch.sequences:
            sequence.drafter.draft_cost = cost

    def _propose(self, batch: Batch) -> list[DraftTree]:
        """The drafters' trees, cut to what the model can verify and what the texts have room for."""
        most, is_chain = batch.limits.budget, batch.target.tier == "chain"
        if self.budget is not None:
            most = min(most, self.budget.max_draft)
        depths = batch.depths()
        wanted = [
            None if sequence.finished else (sequence.drafter, min(most, depth) if is_chain or not depth else most)
            for sequence, depth in zip(batch.sequences, depths, strict=True)
        ]
        if batch.draft_model is not None:
            proposed = propose_together(wanted, batch.draft_model)
        else:
            proposed = [
                None if asked is None else sequence.propose(asked[1])
                for sequence, asked in zip(batch.sequences, wanted, strict=True)
            ]
        trees = [
            DraftTree.chain(sequence.text.tokens[-1]) if tree is None else _cut(tree, batch, depth)
            for sequence, tree, depth in zip(batch.sequences, proposed, depths, strict=True)
        ]
        return trees if self.budget is None else self.budget.cut(trees, batch.num_live)

    def _forward(self, batch: Batch, trees: Sequence[DraftTree]) -> list[NodeOutputs]:
        """What the target computes for each tree's nodes."""
        with self.rank_sync.forward():
            batch.target.forward(trees)
            logits = batch.read(trees)
        return [NodeOutputs(rows, batch.target.node_states(place)) for place, rows in enumerate(logits)]

    def _verify(self, batch: Batch, trees: Sequence[DraftTree]) -> list[VerifyResult]:
        """Choose every sequence's tokens and keep what was accepted; after an error, what was chosen before it."""
        results: list[VerifyResult] = []
        try:
            for sequence, tree in zip(batch.sequences, trees, strict=True):
                ended = VerifyResult([], [])
                results.append(ended if sequence.finished else sequence.verify(tree, self.on_token))
        except BaseException:
            paths = [result.path for result in results] + [batch.sequences[len(results)].visited]
            batch.target.commit(paths + [[0]] * (len(trees) - len(paths)))
            raise
        batch.target.commit([result.path for result in results])
        return results

    def _observe(
        self,
        batch: Batch,
        trees: Sequence[DraftTree],
        outputs: Sequence[NodeOutputs],
        results: Sequence[VerifyResult],
    ) -> None:
        """Tell every drafter what became of its tree; where none is made, the draft model at least."""
        steps = zip(batch.sequences, trees, outputs, results, strict=True)
        for place, (sequence, tree, computed, result) in enumerate(steps):
            if not result.tokens:
                continue
            if batch.draft_model is not None:
                batch.draft_model.read(place, computed.states_along(result.path))
            if self.rank_sync.is_leader:
                sequence.observe(tree, computed, result.tokens)
            elif batch.draft_model is not None:
                batch.draft_model.keep(place, result.tokens)

    def _record(
        self,
        batch: Batch,
        trees: Sequence[DraftTree],
        results: Sequence[VerifyResult],
        num_live: int,
        seconds: _Seconds,
    ) -> None:
        """Count the step, correct the budget, show it to the observer."""
        self.stats.draft_seconds += seconds.draft
        self.stats.verify_seconds += seconds.verify
        self.stats.commit_seconds += seconds.commit
        self.stats.num_forwards += 1
        for sequence, tree, result in zip(batch.sequences, trees, results, strict=True):
            if result.tokens:
                sequence.stats.record_step(tree.num_draft_tokens, result.num_accepted)
                if tree.probabilities is not None:
                    sequence.stats.record_predictions(tree.predictions(result.path, result.tokens))
        before, self._compile_seconds = self._compile_seconds, batch.compile_seconds
        tells_costs = batch.target.tells_costs and before == self._compile_seconds  # not a step that compiles
        if self.budget is not None and tells_costs:
            self.budget.record(
                trees,
                num_live,
                num_tokens=sum(len(result.tokens) for result in results),
                seconds=seconds.verify + seconds.commit,
                draft_seconds=seconds.draft,
            )
        if self.observer is not None:
            start = time.perf_counter()
            self.rank_sync.attempt(self._show, self.observer, batch, trees, results, seconds)
            self._observer_seconds += time.perf_counter() - start

    def _show(
        self,
        observer: Callable[[SpecStep], Any],
        batch: Batch,
        trees: Sequence[DraftTree],
        results: Sequence[VerifyResult],
        seconds: _Seconds,
    ) -> None:
        for sequence, tree, result in zip(batch.sequences, trees, results, strict=True):
            if result.tokens:
                observer(
                    SpecStep(
                        index=self.stats.num_forwards - 1,
                        tree=tree,
                        accepted=tuple(result.tokens),
                        path=tuple(result.path),
                        draft_seconds=seconds.draft,
                        verify_seconds=seconds.verify,
                        commit_seconds=seconds.commit,
                        row=sequence.index,
                        view=sequence.drafter.view,
                        nodes=sequence.drafter.describe(tree) if self.rank_sync.is_leader else (),
                        observer_seconds=self._observer_seconds,
                    )
                )


def _cut(tree: DraftTree, batch: Batch, depth: int) -> DraftTree:
    """A proposed tree as far as the target can verify it."""
    if batch.target.tier == "chain" and not (tree.is_chain and tree.extra is None):
        tree = tree.chained()
    if tree.extra is not None and not batch.fits(tree.extra):
        tree = tree.with_extra(None)
    return tree.truncated(max_depth=depth, max_nodes=batch.limits.budget, vocab_size=batch.limits.vocab_size)
