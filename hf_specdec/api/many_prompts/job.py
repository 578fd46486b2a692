"""One call of `generate_many`: prompts that share a batch, and those that are decoded alone."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_specdec.api.many_prompts.prompt_inputs import INPUT_NAMES, check_names, check_one, inputs_of
from hf_specdec.cache.prefix_cache import PrefixCache
from hf_specdec.call.arguments import PLAIN, read_prompt_request, with_method
from hf_specdec.call.checks import check_taken
from hf_specdec.call.generate import log_notes, prepared_request
from hf_specdec.call.plan import drafting_of, plan_row
from hf_specdec.call.request import Request
from hf_specdec.call.rules import UNREAD, alone, one_by_one
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import generation_model
from hf_specdec.engine.continuous_batching import ContinuousBatching, QueuedSequence
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.decode import queued_sequence_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.per_row import of_prompt
from hf_specdec.engine.sampling.random_streams import seeded
from hf_specdec.engine.shared_processes import agreed_seed
from hf_specdec.engine.step import StepRunner
from hf_specdec.errors import CheckpointError, ConfigError, UnsupportedModelError, without_frames

NOT_YET = object()  # among prompts: none is waiting now
PROMPT_FIELDS = ("prompt", "input_ids", "PROMPT")  # of errors that are one prompt's


@dataclasses.dataclass(frozen=True, slots=True)
class ManyResult:
    """Result of one prompt.

    Attributes:
        index (`int`): the prompt's place among the prompts, from 0.
        prompt: the prompt as it was given.
        token_ids (`list[int]`): the new tokens; those made before an error, if there was one.
        text (`str | None`): the new tokens decoded, special ones left out; `None` without a tokenizer.
        seed (`int | None`): when sampling: plain `generate` of this prompt alone gives the same tokens after
            `torch.manual_seed(seed)`.
        error (`Exception | None`): why the prompt failed; the others go on.
        stats (`SpecStats`): this prompt's counters.
    """

    index: int
    prompt: Any
    token_ids: list[int]
    text: str | None
    seed: int | None
    error: Exception | None
    stats: SpecStats


class _CannotJoin(Exception):
    """A prompt cannot share the batch, for this reason."""


class Job:
    """One call of `generate_many`."""

    def __init__(
        self, wrapper: Any, tokenizer: Any, seed: int | None, prefixes: PrefixCache, kwargs: dict[str, Any]
    ) -> None:
        self.wrapper, self.tokenizer, self.seed, self.kwargs = wrapper, tokenizer, seed, kwargs
        self.prefixes = prefixes
        self.model = generation_model(wrapper)
        self._prompts: dict[int, Any] = {}  # of the rows that are being decoded
        self._seeds: dict[int, int] = {}  # of the prompts that are being sampled
        self._own_seeds: dict[int, int] = {}  # of those that bring one
        self._ready: list[ManyResult] = []  # of prompts that never got a row

    def run(self, prompts: Iterator[tuple[int, Any]], max_rows: int, max_columns: int) -> Iterator[ManyResult]:
        """Results as they finish, of prompts that share a batch, or are decoded one by one where none can."""
        request = self._request()
        if (reason := one_by_one(self.wrapper, request)) is not None:
            if max_rows > 1:
                self._warn_once(f"decodes prompts one by one, whatever max_batch_size is: {reason}")
            for index, prompt in prompts:
                if prompt is NOT_YET:
                    return
                yield self._alone(index, prompt)
            return
        costs = request.costs
        budget = None if costs is None else Budget(costs, max_nodes=request.budget)
        steps = StepRunner(SpecStats(), budget=budget, observer=request.observer)
        batching = ContinuousBatching(steps, max_rows=max_rows, max_columns=max_columns, prefixes=self.prefixes)
        for done in batching.run(self._queued(prompts, request)):
            yield from self._finished()
            prompt = self._prompts.pop(done.index)
            yield self._result(done.index, prompt, done.emitted, done.error, done.stats)
        yield from self._finished()

    def _finished(self) -> Iterator[ManyResult]:
        """Results of prompts that never got a row, in order."""
        while self._ready:
            yield self._ready.pop(0)

    def _request(self) -> Request:
        """The request of every prompt, read from the arguments alone."""
        tokenizer = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        request = read_prompt_request(self.model, {**tokenizer, **self.kwargs})
        if not request.is_default:
            check_taken(request)
        return request

    def _queued(self, prompts: Iterator[tuple[int, Any]], job: Request) -> Iterator[QueuedSequence | None]:
        """Prompts ready to join the batch; those that cannot share it are decoded alone on the way."""
        for index, prompt in prompts:
            if prompt is NOT_YET:
                yield None
                continue
            try:
                queued = self._prepared(index, prompt, job)
            except _CannotJoin as reason:
                self._warn_once(f"decodes some prompts alone: {reason}")
                self._ready.append(self._alone(index, prompt))
                continue
            except Exception as error:
                if not _is_the_prompts_own(error, prompt):
                    raise
                self._ready.append(self._result(index, prompt, [], error, SpecStats()))
                continue
            self._prompts[index] = prompt
            yield queued

    def _prepared(self, index: int, prompt: Any, job: Request) -> QueuedSequence:
        """One prompt ready to join the batch; raises `_CannotJoin` where it is decoded alone."""
        inputs = self._inputs(index, prompt)
        salt = inputs.pop("cache_salt")
        request = prepared_request(self.model, {**self.kwargs, **inputs})
        if request.method.name not in (job.method.name, PLAIN):
            rule, remedy = "must be the same for all prompts of a job", "Pass it to generate_many."
            raise ConfigError("spec_method", rule, request.method.name, remedy)
        if (reason := alone(request)) is not None:
            raise _CannotJoin(reason)
        if request.drafts_with_network != job.drafts_with_network:
            raise _CannotJoin(UNREAD)
        plan = plan_row(request)
        if plan.plain_reason is not None:
            raise _CannotJoin(plan.plain_reason)
        draft_runner, make_drafter = drafting_of(request, plan)
        seed = self._seed_of(index, inputs)
        generator = None if seed is None else torch.Generator(request.device).manual_seed(seed)
        log_notes(self.model, plan)
        drafter = make_drafter(0, generator)
        queued = queued_sequence_of(request.call, plan, drafter, index, generator, draft_runner, salt)
        queued.sequence.stats.seeds = None if seed is None else [seed]
        return queued

    def _alone(self, index: int, prompt: Any) -> ManyResult:
        """One prompt through `generate`, with its own random stream."""
        try:
            inputs = self._inputs(index, prompt)
            del inputs["cache_salt"]
            if (observer := self.kwargs.get("spec_observer")) is not None:
                inputs["spec_observer"] = lambda step: observer(dataclasses.replace(step, row=index))
            seed = self._seed_of(index, inputs)
            kwargs = with_method(self.model, {**self.kwargs, **inputs})
            kwargs["return_dict_in_generate"] = True
            with contextlib.nullcontext() if seed is None else seeded(seed, input_device(self.model)):
                output = self.wrapper.generate(**kwargs)
        except Exception as error:
            if not _is_the_prompts_own(error, prompt):
                raise
            return self._result(index, prompt, [], error, SpecStats())
        if output.sequences.ndim != 2:
            shape, name = tuple(output.sequences.shape), type(self.model).__name__
            raise UnsupportedModelError(f"{name} writes no text: its sequences have shape {shape}. Call its generate.")
        stats: SpecStats = output.spec_stats
        stats.seeds = None if seed is None else [seed]
        new_tokens = output.sequences[0, output.sequences.shape[1] - stats.num_tokens :].tolist()
        return self._result(index, prompt, new_tokens, None, stats)

    def _warn_once(self, what: str) -> None:
        state_of(self.model).warn_once(f"{type(self.model).__name__} {what}")

    def _result(
        self, index: int, prompt: Any, token_ids: list[int], error: Exception | None, stats: SpecStats
    ) -> ManyResult:
        text = None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)
        error = error and without_frames(error)
        return ManyResult(index, prompt, token_ids, text, self._seeds.pop(index, None), error, stats)

    def _inputs(self, index: int, prompt: Any) -> dict[str, Any]:
        """`generate`'s inputs for one sequence, on the model's device."""
        inputs = inputs_of(prompt, self.tokenizer)
        check_one(inputs, prompt)
        if (seed := inputs.pop("seed", None)) is not None:
            self._own_seeds[index] = seed
        salt = inputs.pop("cache_salt", None)
        check_names(self.model, inputs)
        if self.tokenizer is not None:
            inputs.setdefault("tokenizer", self.tokenizer)
        for name in ("logits_processor", "stopping_criteria"):
            if items := inputs.get(name, self.kwargs.get(name)):
                inputs[name] = of_prompt(items, index)
        device = input_device(self.model)
        inputs["cache_salt"] = salt
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}

    def _seed_of(self, index: int, inputs: dict[str, Any]) -> int | None:
        """Seed of one prompt, if it samples; a job that does not draws its seed when the first prompt does."""
        kwargs = {**self.kwargs, **inputs}
        seed = self._own_seeds.pop(index, None)
        if not Request.of(self.model, kwargs).setting("do_sample"):
            return None
        if seed is None:
            if self.seed is None:
                self.seed = agreed_seed(self.model)
            seed = self.seed + index
        self._seeds[index] = seed
        return seed


def _is_the_prompts_own(error: Exception, prompt: Any) -> bool:
    """Returns whether other prompts may still work."""
    if isinstance(error, UnsupportedModelError | CheckpointError):
        return False
    has_settings = isinstance(prompt, Mapping) and bool(prompt.keys() - INPUT_NAMES)
    return not isinstance(error, ConfigError) or error.field in PROMPT_FIELDS or has_settings
