"""Carries out the plan of a call in this package's loop, from prepared inputs to the output object.

Decides nothing, and knows no method by name.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hf_specdec.common.stats import CallPlan, SpecStats
from hf_specdec.common.transfer import HOST
from hf_specdec.compat.attention import position_limit
from hf_specdec.compat.caches import is_users_own
from hf_specdec.compat.generation import pad_token_id
from hf_specdec.compat.models import readable_padding, text_config
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.call import Call, call_output, with_stats
from hf_specdec.engine.continuous_batching import QueuedSequence
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.per_row import criteria_of_row, processors_of_row
from hf_specdec.engine.sampling.sampler import Sampler
from hf_specdec.engine.sequence import SequenceState, check_own_drafters, isolated_rng
from hf_specdec.engine.static_shapes import compiled_target, fixed_shapes
from hf_specdec.engine.step import StepRunner
from hf_specdec.engine.stopping import StopCheck
from hf_specdec.forward.model_runner import MAX_DRAFT, ModelRunner
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.drafter import BaseDrafter

MakeDrafter = Callable[[int, torch.Generator | None], BaseDrafter]


class _Loop:
    """Decodes all sequences of a batch to their ends."""

    def __init__(self, batch: Batch, steps: StepRunner, *, streamer: Any) -> None:
        self.batch, self.sequences, self.streamer, self._steps = batch, list(batch.sequences), streamer, steps
        if streamer is not None:
            self._steps.on_token = self._stream

    def run(self) -> None:
        """Prompt, then steps until every text ends. Whatever happens, the cache is left holding the text."""
        target = self.batch.target
        try:
            self._steps.begin(self.batch)
            while self.batch.num_live:
                self._retire()
                self._steps.run(self.batch)
            self._steps.end()
            for sequence in self.sequences:
                sequence.pad(self.length, self.batch.pad_token_id)
            if target.keep_cache:
                target.catch_up(self.length)
        except BaseException as error:
            self._steps.abandon(error)
            raise
        finally:
            self.batch.close(*self.sequences)

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(sequence.length for sequence in self.sequences)

    def _stream(self, sequence: SequenceState, node: int, token: int) -> None:
        """Hand a token to the streamer."""
        self.streamer.put(torch.tensor([token], device=HOST))

    def _retire(self) -> None:
        """Take finished sequences out of the batch, where they can leave it."""
        live = [place for place, sequence in enumerate(self.batch.sequences) if not sequence.finished]
        if len(live) < len(self.batch.sequences) and self.batch.target.supports_row_removal:
            self.batch.select(live)


def decode_speculatively(
    call: Call,
    plan: CallPlan,
    make_drafter: MakeDrafter,
    *,
    steps: StepRunner,
    draft_runner: BaseDraftRunner | None,
) -> Any:
    """Decode in our loop; returns what plain generation would return, with `.spec_stats`.

    Args:
        make_drafter: makes the drafter of one sequence from its index and random generator.
        steps: takes the call's batch one step further.
    """
    config, stats = call.generation_config, steps.stats
    texts = _texts(call)
    sequences = _sequences(call, texts, make_drafter, steps)
    target = ModelRunner(
        call.model,
        call.input_ids,
        config,
        call.model_kwargs,
        texts,
        tier=plan.way,
        keep_cache=bool(config.return_dict_in_generate) or is_users_own(call.cache),
        hidden_layers=_read_layers(draft_runner),
        fixed=fixed_shapes(call, plan) if plan.widths else None,
        compiled=compiled_target(call) if plan.is_compiled else None,
        facts=call.facts,
        is_undisturbed=call.is_undisturbed,
    )
    stats.method = stats.method or type(sequences[0].drafter).__name__
    loop = _Loop(_batch(call, plan, sequences, target, steps.network(draft_runner)), steps, streamer=call.streamer)
    _run(loop, stats)
    if config.do_sample:
        steps.share_random_state()
    if call.streamer is not None:
        call.streamer.end()
    ids = torch.cat([text.ids()[:, : loop.length] for text in texts])  # (batch, longest)
    if (padding := pad_token_id(config)) != loop.batch.pad_token_id:  # one that no forward could read
        for row, sequence in enumerate(sequences):
            ids[row, sequence.length :] = padding
    if not config.return_dict_in_generate:
        return ids
    return with_stats(call_output(call, loop.sequences, target.cache.handed_out, ids), stats)


def _run(loop: _Loop, stats: SpecStats) -> None:
    """Decode to the end; count what was compiled, and say once what could not be."""
    compiled_before = loop.batch.compile_seconds
    loop.run()
    forwards = loop.batch.target.forwards
    stats.num_replayed, stats.record_reason = forwards.num_replayed, forwards.reason
    stats.compile_seconds = loop.batch.compile_seconds - compiled_before
    for forward in loop.batch.compiled:
        stats.num_graphs += forward.num_graphs
        if forward.reason is not None:
            state_of(forward.model).warn_once(f"{type(forward.model).__name__} is not compiled: {forward.reason}")


def _batch(
    call: Call,
    plan: CallPlan,
    sequences: list[SequenceState],
    target: ModelRunner,
    draft_runner: BaseDraftRunner | None,
) -> Batch:
    return Batch(
        sequences,
        target,
        max_nodes=plan.budget,
        max_positions=call.facts.of(position_limit, call.model),
        vocab_size=getattr(text_config(call.model.config), "vocab_size", None),
        pad_token_id=readable_padding(call.model, pad_token_id(call.generation_config)),
        draft_runner=draft_runner,
        rounds_alike=plan.rounding_reason is None,
    )


def _texts(call: Call) -> list[TokenBuffer]:
    """Every row's text so far: the prompt, padding included."""
    return [TokenBuffer(call.input_ids[row : row + 1], room=call.room) for row in range(len(call.input_ids))]


def _sequences(
    call: Call, texts: Sequence[TokenBuffer], make_drafter: MakeDrafter, steps: StepRunner
) -> list[SequenceState]:
    """Every sequence; a single one draws from the global generator, those of a batch from one each, seeded by that."""
    device = call.input_ids.device
    generators: list[torch.Generator | None] = [None] * len(texts)
    if len(texts) > 1 and call.generation_config.do_sample:
        first = steps.seed()
        steps.stats.seeds = [first + row for row in range(len(texts))]
        generators = [torch.Generator(device).manual_seed(seed) for seed in steps.stats.seeds]
    sequences: list[SequenceState] = []
    for index, (text, generator) in enumerate(zip(texts, generators, strict=True)):
        processors, criteria = call.logits_processor, call.stopping_criteria
        if len(texts) > 1:
            processors = processors_of_row(processors, index)
            criteria = criteria_of_row(criteria, index)
        sampler = Sampler(processors, call.generation_config, device, generator)
        prompt = call.prompt_of(index)
        with isolated_rng(sampler):
            drafter = make_drafter(index, generator)
        check_own_drafters(drafter, sequences)
        stop_check = StopCheck(criteria)
        sequences.append(SequenceState(index, text, prompt, drafter, sampler, stop_check, steps.stats))
    return sequences


def queued_sequence_of(
    call: Call,
    plan: CallPlan,
    drafter: BaseDrafter,
    index: int,
    generator: torch.Generator | None,
    draft_runner: BaseDraftRunner | None,
    prefix_key: Hashable,
) -> QueuedSequence:
    """A call of one sequence, to be decoded among others."""
    (text,) = _texts(call)
    sampler = Sampler(call.logits_processor, call.generation_config, call.input_ids.device, generator)
    stats = SpecStats.of(plan)
    stats.method = stats.method or type(drafter).__name__
    stop_check = StopCheck(call.stopping_criteria)
    sequence = SequenceState(index, text, text.tokens.copy(), drafter, sampler, stop_check, stats)
    target = ModelRunner(
        call.model,
        call.input_ids,
        call.generation_config,
        call.model_kwargs,
        [text],
        tier=plan.way,
        keep_cache=False,
        hidden_layers=_read_layers(draft_runner),
        facts=call.facts,
    )
    longest = len(text) + (call.max_new_tokens or 0) + MAX_DRAFT
    batch = _batch(call, plan, [sequence], target, draft_runner)
    return QueuedSequence(batch, longest, (call.now, prefix_key))


def _read_layers(draft_runner: BaseDraftRunner | None) -> tuple[int, ...]:
    """The hidden states that the drafts are made from."""
    return () if draft_runner is None else draft_runner.hidden_layers
