"""One verify step of a batch: propose, forward, verify, commit, observe.

Knows neither methods nor models: a `Drafter` proposes, a `ModelRunner` computes, a `Sampler` and a `StopCheck` decide.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_specdec.common.stats import SpecStats, SpecStep
from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.sampling.random_streams import drawn_seed
from hf_specdec.engine.sequence import OnToken, SequenceState, isolated_rng
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.forward.networks.runner_base import BaseDraftRunner, DraftForwards, propose_together
from hf_specdec.forward.node_outputs import NodeOutputs, TopTokens
from hf_specdec.methods.common.drafter import NO_COST, BaseDrafter, DraftCost, DraftRequest


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of a step by phase, all sequences together; the draft network's `forwards` are part of `draft`."""

    draft: float
    verify: float
    commit: float
    forwards: DraftForwards
    noise: tuple[float, float]  # of random numbers, while drafting and while verifying


class StepRunner:
    """Takes batches one step further.

    Args:
        stats: gets the forwards and seconds; each sequence has its own for tokens and drafts.
        budget: decides how much of the weighed sequences' drafts is verified; without one, all of it.
        observer: called with a `SpecStep` for every sequence after every verify step.

    Attributes:
        on_token: called with the sequence, the node that decided and the token, for every token of a text.
        leads (`bool`): whether this process drafts and chooses.
    """

    leads = True

    def __init__(
        self,
        stats: SpecStats,
        *,
        budget: Budget | None,
        observer: Callable[[SpecStep], None] | None,
    ) -> None:
        self.stats, self.budget, self.observer = stats, budget, observer
        self.on_token: OnToken | None = None
        self._observer_seconds = self._compile_seconds = 0.0
        self._draws: contextlib.AbstractContextManager[None] | None = None  # of observers
        self._unrecorded: Callable[[], None] | None = None  # the last step's counts and costs

    def seed(self) -> int:
        """A number drawn from the global generator."""
        return drawn_seed()

    def network(self, draft_runner: BaseDraftRunner | None) -> BaseDraftRunner | None:
        """The draft network, where this process computes with it."""
        return draft_runner

    def abandon(self, error: BaseException) -> None:
        """An error ends the call."""

    def share_random_state(self) -> None:
        """Give all processes the random state of the one that leads."""

    def begin(self, batch: Batch) -> None:
        """Read the prompts, choose every first token, then let the drafters begin."""
        start, self._compile_seconds = time.perf_counter(), batch.compile_seconds
        cached = batch.target.cache.spec
        has_cached = cached is not None and any(cached.lengths)
        of_prompts = self._prefill(batch)
        read = time.perf_counter()
        trees = [sequence.tree for sequence in batch.sequences]
        logits = batch.read(trees)
        self._choose(batch, trees, [])
        chosen = time.perf_counter()
        if self.budget is not None and not has_cached:
            self.budget.has_read(sum(len(sequence.text) for sequence in batch.sequences), chosen - start)
        for place, sequence in enumerate(batch.sequences):
            of_prompt = of_prompts[place] if of_prompts else None
            outputs = NodeOutputs(logits[place], batch.target.states_read(place), of_prompt)
            if batch.draft_runner is not None:
                batch.draft_runner.read(place, outputs.hidden_states)
            if self.leads and sequence.error is None:
                sequence.begin(sequence.text.tokens[-1], outputs)
            elif batch.draft_runner is not None and sequence.prompt:
                batch.draft_runner.keep(place, sequence.text.tokens[-1:])
        self.stats.prefill_seconds += read - start
        self.stats.draft_seconds += time.perf_counter() - chosen

    def run(self, batch: Batch) -> None:
        """One step of all sequences that have not ended."""
        budget = self.budget
        cost = NO_COST if budget is None else batch.draft_cost(budget)
        began, noise, forwards = time.perf_counter(), batch.noise_seconds, DraftForwards()
        trees = self._trees(batch, forwards, budget, cost)
        drafted, noise_drafted = time.perf_counter(), batch.noise_seconds
        num_live = batch.num_live
        trees, outputs, is_repeated = self._forward(batch, trees)
        verified = time.perf_counter()
        results = self._verify(batch, trees)
        committed = time.perf_counter()
        self._observe(batch, trees, outputs, results)
        drafting = drafted - began + time.perf_counter() - committed
        of_noise = (noise_drafted - noise, batch.noise_seconds - noise_drafted)
        seconds = _Seconds(drafting, verified - drafted, committed - verified, forwards, of_noise)
        before, self._compile_seconds = self._compile_seconds, batch.compile_seconds
        # A step that compiles, records a forward or computes twice tells nothing of the target's costs.
        is_compiled = before != self._compile_seconds
        is_usual = batch.target.forwards.is_usual and not is_compiled and not is_repeated
        learns = budget is not None and (is_usual or budget.costs.is_fixed)  # fixed: the same whatever was recorded
        if budget is not None and not is_compiled:
            budget.has_drafted(forwards, len(trees))
        sequences = tuple(batch.sequences)
        self._unrecorded = functools.partial(
            self._record, sequences, trees, results, num_live, seconds, budget if learns else None
        )
        is_observed = self.observer is not None
        has_ended = any(
            sequence.finished and result.tokens for sequence, result in zip(sequences, results, strict=True)
        )
        if is_observed or has_ended or any(sequence.sampler.constraint is not None for sequence in sequences):
            self.finish()
        if is_observed:
            start = time.perf_counter()
            self._draws = self._draws or isolated_rng(sequences[0].sampler)
            with self._draws:
                self._show(batch, trees, results, seconds)
            self._observer_seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Count the last step and correct the budget by it: while the device computes the next one.

        Before, where a text has ended or someone looks at each step.
        """
        if (record := self._unrecorded) is not None:
            self._unrecorded = None
            record()

    def end(self) -> None:
        """All texts have ended."""
        self.finish()

    def _prefill(self, batch: Batch) -> list[TopTokens | None]:
        wanted = [sequence.asked_of_prompt for sequence in batch.sequences]
        return batch.prompt.read(wanted if any(tokens for tokens, _ in wanted) else ())

    def _trees(self, batch: Batch, forwards: DraftForwards, budget: Budget | None, cost: DraftCost) -> list[DraftTree]:
        """Get the drafters' trees, cut to what the model can verify and what the texts have room for."""
        most, is_chain = batch.max_nodes, batch.target.tier == "chain"
        most = most if budget is None else min(most, budget.max_draft)
        depths = batch.depths()
        wanted: list[tuple[BaseDrafter, DraftRequest] | None] = []
        for sequence, depth in zip(batch.sequences, depths, strict=True):
            if sequence.finished:
                wanted.append(None)
                continue
            request = DraftRequest(
                budget=min(most, depth) if is_chain or not depth else most,
                max_depth=depth,
                num_rows=len(batch.sequences),
                cost=cost,
                noise=sequence.sampler.noise,
            )
            wanted.append((sequence.drafter, request))
        if batch.draft_runner is not None:
            proposed = propose_together(wanted, batch.draft_runner, forwards)
        else:
            proposed = [
                None if row is None else sequence.propose(row[1])
                for sequence, row in zip(batch.sequences, wanted, strict=True)
            ]
        trees = [
            DraftTree.chain(sequence.text.tokens[-1])
            if tree is None
            else batch.verifiable(sequence.constrained(tree), depth)
            for sequence, tree, depth in zip(batch.sequences, proposed, depths, strict=True)
        ]
        return batch.worthwhile(trees, budget)

    def _forward(self, batch: Batch, trees: list[DraftTree]) -> tuple[list[DraftTree], list[NodeOutputs], bool]:
        """Runs the target's forward over each tree's nodes: again without the drafts where one of them spoils it."""
        batch.target.forward(trees)
        self.finish()
        logits = batch.read(trees)
        num_repeats = int(any(rows.is_spoiled for rows in logits))
        if num_repeats:
            batch.target.forget()
            trees = batch.without_drafts(trees)
            batch.target.forward(trees)
            self.stats.num_forwards += num_repeats
            logits = batch.read(trees)
        outputs = [NodeOutputs(rows, batch.target.states_read(place)) for place, rows in enumerate(logits)]
        return trees, outputs, num_repeats > 0

    def _verify(self, batch: Batch, trees: Sequence[DraftTree]) -> list[VerifyResult]:
        """Choose every sequence's tokens and keep what was accepted; after an error, what was chosen before it."""
        results: list[VerifyResult] = []
        try:
            self._choose(batch, trees, results)
        except BaseException:
            interrupted = [sequence.visited for sequence in batch.sequences[len(results) :][:1]]
            paths = [*(result.path for result in results), *interrupted]
            batch.target.commit(paths + [[0]] * (len(trees) - len(paths)))
            raise
        batch.target.commit([result.path for result in results])
        return results

    def _choose(self, batch: Batch, trees: Sequence[DraftTree], results: list[VerifyResult]) -> None:
        """Choose every sequence's tokens, and add its result to `results`."""
        for sequence, tree in zip(batch.sequences, trees, strict=True):
            results.append(sequence.verify(tree, self.on_token))

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
            if batch.draft_runner is not None:
                batch.draft_runner.read(place, computed.states_along(result.path))
            if self.leads:
                sequence.observe(tree, computed, result.tokens)
            elif batch.draft_runner is not None:
                batch.draft_runner.keep(place, result.tokens)

    def _record(
        self,
        sequences: Sequence[SequenceState],
        trees: Sequence[DraftTree],
        results: Sequence[VerifyResult],
        num_live: int,
        seconds: _Seconds,
        budget: Budget | None,
    ) -> None:
        """Count a step, and correct the budget by its costs."""
        self.stats.draft_seconds += seconds.draft
        self.stats.verify_seconds += seconds.verify
        self.stats.commit_seconds += seconds.commit
        self.stats.num_forwards += 1
        for sequence, tree, result in zip(sequences, trees, results, strict=True):
            if result.tokens:
                sequence.stats.record_step(tree.num_draft_tokens, result.num_accepted)
                if sequence.sampler.constraint is not None:
                    drafted = set(sequence.own_nodes(tree))
                    sequence.stats.record_forced(
                        len(tree) - len(drafted), sum(node not in drafted for node in result.path)
                    )
        if budget is not None:  # each token takes a row of noise, whatever step it is drawn in
            budget.record(
                trees,
                num_live,
                num_tokens=sum(len(result.tokens) for result in results),
                seconds=seconds.verify + seconds.commit - seconds.noise[1],
                draft_seconds=seconds.draft - seconds.noise[0],
                forwards=seconds.forwards,
            )

    def _show(
        self, batch: Batch, trees: Sequence[DraftTree], results: Sequence[VerifyResult], seconds: _Seconds
    ) -> None:
        assert self.observer is not None
        for sequence, tree, result in zip(batch.sequences, trees, results, strict=True):
            if result.tokens:
                self.observer(
                    SpecStep(
                        index=self.stats.num_forwards - 1,
                        tree=tree,
                        accepted=tuple(result.tokens),
                        path=tuple(result.path),
                        draft_seconds=seconds.draft,
                        verify_seconds=seconds.verify,
                        commit_seconds=seconds.commit,
                        row=sequence.index,
                        nodes=sequence.describe(tree) if self.leads else (),
                        observer_seconds=self._observer_seconds,
                    )
                )
