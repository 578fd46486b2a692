"""Many prompts, one model: `generate_many` keeps a batch full, whatever the prompts' lengths.

for result in hf_specdec.generate_many(model, prompts, tokenizer=tokenizer, max_new_tokens=64):
    print(result.index, result.text)
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.api import enable, prepared_call
from hf_specdec.arguments import settings_of
from hf_specdec.distributed.rank_sync import RankSync, rank_sync_of
from hf_specdec.engine.call import Call
from hf_specdec.engine.continuous_batching import QueuedSequence, SpecStream
from hf_specdec.engine.decode import costs_of, drafting, fields_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.speculative import budget_of, queued_sequence_of
from hf_specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from hf_specdec.methods.config import check_positive
from hf_specdec.progress import with_bar
from hf_specdec.request import Request, own_arguments, read_request
from hf_specdec.stats import SpecStats

__all__ = ["ManyResult", "generate_many"]

MAX_CACHE_TOKENS = 1 << 18
ROW_TENSORS = ("attention_mask", "position_ids")  # of a prompt alone, all ones and a count
NOT_FOR_MANY = ("streamer", "num_return_sequences", "past_key_values", "inputs_embeds")
NOT_FOR_ONE = ("streamer", "num_return_sequences")
PROMPT_FIELDS = ("prompt", "input_ids", "PROMPT")  # of errors that are one prompt's


@dataclasses.dataclass(frozen=True, slots=True)
class ManyResult:
    """What became of one prompt.

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


def generate_many(
    model: Any,
    prompts: Iterable[Any],
    *,
    max_batch_size: int = 8,
    tokenizer: Any = None,
    seed: int | None = None,
    max_cache_tokens: int = MAX_CACHE_TOKENS,
    spec_method: Any = "prompt_lookup",
    indices: Iterable[int] | None = None,
    progress: bool = False,
    **generate_kwargs: Any,
) -> Iterator[ManyResult]:
    """Generate for many prompts, yielding results as they finish.

    A row of the batch whose text ends goes to the next prompt at once. Each result is what `model.generate` gives for
    its prompt alone (in fp32; half precisions may differ in near ties), whatever the order of the prompts and the
    size of the batch. Prompts that share a beginning with one that is being decoded have its keys and values copied.

    Args:
        model: a transformers model; it is enabled if it is not.
        prompts: an iterable, read as rows get free, of strings (with `tokenizer`), lists of token ids, tensors
            `(length,)` or `(1, length)`, or dicts of `generate`'s inputs for one sequence.
        max_batch_size (`int`, *optional*, defaults to `8`): rows decoded together.
        tokenizer: encodes strings, decodes results, and serves `stop_strings`.
        seed (`int`, *optional*): when sampling, prompt i draws from `seed + i`; by default a seed is drawn.
        max_cache_tokens (`int`, *optional*, defaults to `262144`): bound on rows x longest text, in tokens, which is
            what the key/value cache allocates. A prompt that alone needs more is decoded alone.
        spec_method: as for `generate`; `"plain"` drafts nothing.
        indices (`Iterable[int]`, *optional*): the prompts' numbers, where they are part of a larger job; by default
            they are counted from 0.
        progress (`bool`, *optional*, defaults to `False`): show a bar on stderr, if that is a terminal.
        generate_kwargs: as for `generate`, the same for all prompts: `max_new_tokens`, `do_sample`, `spec_config`,
            `spec_observer` (a step's `row` is its prompt's index)...

    Raises:
        ConfigError: a setting that is wrong for every prompt. What is wrong with one prompt is its result's `error`.
    """
    check_positive("max_batch_size", max_batch_size, "Usual values are 4 to 32.")
    check_positive("max_cache_tokens", max_cache_tokens, "The default is 262144.")
    inner = compat.generation_model(enable(model))
    settings = settings_of(generate_kwargs, _configs(inner, generate_kwargs))
    for name in NOT_FOR_MANY:
        if (value := settings(name)) is not None and value != 1:
            raise ConfigError(name, "must be unset for many prompts", value, "Use generate for it.")
    if seed is None and settings("do_sample"):
        seed = rank_sync_of(inner).decide_now(lambda: int(torch.randint(1 << 62, ())))
    job = _Job(inner, tokenizer, seed, {**generate_kwargs, "spec_method": spec_method})
    numbers = itertools.count() if indices is None else indices
    results = job.run(zip(numbers, prompts, strict=False), max_batch_size, max_cache_tokens)
    return with_bar(results, total=length_hint(prompts) or None) if progress else results


class _Job:
    """One call of `generate_many`."""

    def __init__(self, model: Any, tokenizer: Any, seed: int | None, kwargs: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.seed, self.kwargs = model, tokenizer, seed, kwargs
        self._prompts: dict[int, Any] = {}  # of the rows that are being decoded
        self._seeds: dict[int, int] = {}  # of the prompts that are being sampled
        self._ready: list[ManyResult] = []

    def run(self, prompts: Iterator[tuple[int, Any]], max_rows: int, max_columns: int) -> Iterator[ManyResult]:
        """Results as they finish."""
        request = self._request()
        if not self._can_share(request):
            for index, prompt in prompts:
                yield self._alone(index, prompt)
            return
        rank_sync = rank_sync_of(self.model)
        costs = costs_of(self.model, request, compat.input_device(self.model))
        stream = SpecStream(
            max_rows=max_rows,
            max_columns=max_columns,
            budget=budget_of(self.model, request.budget, costs),
            observer=request.observer,
            rank_sync=rank_sync,
        )
        for row in stream.run_all(self._guests(prompts, rank_sync)):
            yield from self._finished()
            yield self._result(row.index, self._prompts.pop(row.index), row.emitted, row.error, row.stats)
        yield from self._finished()

    def _request(self) -> Request:
        """What is asked for, without any prompt."""
        configs = _configs(self.model, self.kwargs)
        request = read_request(dict(self.kwargs), configs, state_of(self.model).defaults)
        if request is None:
            raise ConfigError("spec_method", "must be given", None, 'Use "plain" for no drafts.')
        return request

    def _can_share(self, request: Request) -> bool:
        """Whether the model can decode prompts together, by our loop."""
        state = state_of(self.model)
        tier = state.capability(self.model).tier
        ours = request.config.engine == "loop" and self.kwargs.get("assistant_tokenizer") is None
        asks_model = compat.has_own_input_preparation(self.model) or self.model.config.is_encoder_decoder
        return tier == "tree" and ours and not asks_model and state.batch_fallback_reason(self.model) is None

    def _finished(self) -> Iterator[ManyResult]:
        """Results of prompts that never got a row."""
        while self._ready:
            yield self._ready.pop(0)

    def _guests(self, prompts: Iterator[tuple[int, Any]], rank_sync: RankSync) -> Iterator[QueuedSequence]:
        """Prompts ready to be seated; what cannot share a batch is decoded alone on the way."""
        for index, prompt in prompts:
            try:
                inputs = self._inputs(prompt)
                if _asks_for_none(inputs):
                    self._ready.append(self._alone(index, prompt))
                    continue
                call, request = prepared_call(self.model, {**self.kwargs, **inputs})
                if not _can_share(call):
                    self._ready.append(self._alone(index, prompt))
                    continue
                draft_model, make_drafter = drafting(call, request)
                if draft_model is not None and not draft_model.reads_prompt:
                    self._ready.append(self._alone(index, prompt))
                    continue
                seed = self._seed_of(index, inputs)
                generator = None if seed is None else torch.Generator(call.input_ids.device).manual_seed(seed)
                rank_sync.check(lambda: fields_of(call, request, prompt=index))  # noqa: B023 - called at once
                drafter = make_drafter(0, generator)
                guest = queued_sequence_of(call, request.budget, drafter, index, generator, draft_model, rank_sync)
                guest.row.stats.method = request.name or guest.row.stats.method
                guest.row.stats.seeds = None if seed is None else [seed]
            except Exception as error:
                if not _is_the_prompts_own(error) or not rank_sync.intact:
                    raise
                self._ready.append(self._result(index, prompt, [], error, SpecStats()))
                continue
            self._prompts[index] = prompt
            yield guest

    def _alone(self, index: int, prompt: Any) -> ManyResult:
        """One prompt through `generate`, with its own random stream."""
        try:
            inputs = self._inputs(prompt)
            if (observer := self.kwargs.get("spec_observer")) is not None:
                inputs["spec_observer"] = lambda step: observer(dataclasses.replace(step, row=index))
            seed = self._seed_of(index, inputs)
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                kwargs = {**self.kwargs, **inputs, "return_dict_in_generate": True}
                output = self.model.generate(**(_without_drafts(kwargs) if _asks_for_none(inputs) else kwargs))
        except Exception as error:
            if not _is_the_prompts_own(error):
                raise
            return self._result(index, prompt, [], error, SpecStats())
        stats: SpecStats = output.spec_stats
        stats.seeds = None if seed is None else [seed]
        new_tokens = output.sequences[0, output.sequences.shape[1] - stats.num_tokens :].tolist()
        return self._result(index, prompt, new_tokens, None, stats)

    def _result(
        self, index: int, prompt: Any, token_ids: list[int], error: Exception | None, stats: SpecStats
    ) -> ManyResult:
        text = None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return ManyResult(index, prompt, token_ids, text, self._seeds.pop(index, None), error, stats)

    def _inputs(self, prompt: Any) -> dict[str, Any]:
        """`generate`'s inputs for one sequence, on the model's device."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("tokenizer", "must be given for prompts that are text", None, "Pass tokenizer=...")
            inputs = dict(self.tokenizer(prompt, return_tensors="pt"))
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        elif isinstance(prompt, Mapping):
            inputs = dict(prompt)
        else:
            inputs = {"input_ids": torch.as_tensor(prompt)}
        ids = inputs.get("input_ids")
        if isinstance(ids, torch.Tensor):
            ids = inputs["input_ids"] = ids[None] if ids.ndim == 1 else ids
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1 or ids.is_floating_point():
            rule = "must hold the token ids of one sequence"
            raise ConfigError("prompt", rule, prompt, "Give a string, a list of token ids or a tensor.")
        for name in NOT_FOR_ONE:
            if inputs.get(name) not in (None, 1):
                raise ConfigError("prompt", f"must not set {name}", inputs[name], "Use generate for it.")
        if self.tokenizer is not None:
            inputs.setdefault("tokenizer", self.tokenizer)
        device = compat.input_device(self.model)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}

    def _seed_of(self, index: int, inputs: dict[str, Any]) -> int | None:
        """What one prompt draws from, if it samples; a job that does not draws its seed when the first prompt does."""
        kwargs = {**self.kwargs, **inputs}
        if not settings_of(kwargs, _configs(self.model, kwargs))("do_sample"):
            return None
        if self.seed is None:
            self.seed = rank_sync_of(self.model).decide_now(lambda: int(torch.randint(1 << 62, ())))
        self._seeds[index] = self.seed + index
        return self._seeds[index]


def _asks_for_none(inputs: Mapping[str, Any]) -> bool:
    """Whether a prompt wants no speculation, whatever the job does."""
    return "spec_method" in inputs and inputs["spec_method"] is None


def _without_drafts(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` without those of a method."""
    names = {*own_arguments(), "assistant_model"} - {"spec_observer"}
    return {**{name: value for name, value in kwargs.items() if name not in names}, "spec_method": "plain"}


def _configs(model: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Generation configurations of a call, the one that counts most first."""
    return [c for c in (kwargs.get("generation_config"), model.generation_config) if c is not None]


def _can_share(call: Call) -> bool:
    """Whether the prompt's forwards take nothing of a row but ids and positions, counted from 0.

    Its cache has to be one that may change its shape, and that nobody looks at afterwards.
    """
    kwargs = call.model_kwargs
    cache = kwargs.get(compat.cache_name(kwargs))
    if isinstance(cache, compat.StaticCache) or compat.is_users_own(cache):
        return False
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    tensors = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    if not tensors <= set(ROW_TENSORS) or (mask is not None and not bool(mask.all())):
        return False
    counted = torch.arange(call.input_ids.shape[1], device=call.input_ids.device)
    return positions is None or (positions.shape[-1] == len(counted) and bool((positions == counted).all()))


def _is_the_prompts_own(error: Exception) -> bool:
    """Whether other prompts may still work."""
    if isinstance(error, UnsupportedModelError | CheckpointError):
        return False
    return not isinstance(error, ConfigError) or error.field in PROMPT_FIELDS
