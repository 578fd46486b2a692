"""Plain `generate`, transformers' own speculation and one of our methods, in turn on the same prompts.

A machine's speed drifts, so the three take turns within a round and a ratio is the median of the ratios of single
calls that ran one after the other. Each round begins with what the model remembered before, so that no call can draft
from its own answer. Knows nothing about printing.

    rows = compare_methods(job, inputs, {"spec_method": "prompt_lookup", "spec_config": config}, rounds=3)
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hf_specdec.cli.job import Job, Result, count_forwards
from hf_specdec.cli.report import note
from hf_specdec.engine.model_state import remembering, state_of
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.stats import SpecStats

__all__ = ["ASSISTED", "PLAIN", "TRANSFORMERS", "Row", "compare_methods"]

PLAIN = "plain generate"
TRANSFORMERS = "transformers prompt lookup"
ASSISTED = "transformers assistant"

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to generate, over all prompts.

    Attributes:
        tokens (`int`): new tokens of one round.
        tokens_per_second (`float`): over all rounds.
        ratio_to_plain, ratio_to_transformers (`float | None`):
            median over prompts and rounds of this row's tokens per second to the other's, round by round.
        drafted, accepted (`int`): draft tokens of one round, and those of them that were emitted.
        mean_acceptance_length (`float`): tokens a verify step.
        prompts_equal_to_plain (`int`): prompts with plain generate's token ids in every round.
        equal_to_plain (`bool`): whether that holds for all prompts.
    """

    name: str
    tokens: int
    tokens_per_second: float
    ratio_to_plain: float | None
    ratio_to_transformers: float | None
    drafted: int
    accepted: int
    mean_acceptance_length: float
    prompts_equal_to_plain: int
    equal_to_plain: bool


def compare_methods(job: Job, prompts: Sequence[Inputs], how: Mapping[str, Any], rounds: int) -> list[Row]:
    """Run every way on every prompt, once to warm up and then `rounds` times, and sum up.

    Args:
        how: the arguments of `generate` that choose the method. With a draft model among them transformers' way is its
            assisted generation with that draft at transformers' own settings; else its prompt lookup.
    """
    ways: dict[str, Mapping[str, Any]] = {PLAIN: {}, **_transformers_way(how), how["spec_method"]: how}
    known = state_of(job.model).memory
    with remembering(job.model, copy.deepcopy(known)):
        warm_ups = {name: _warm_up(job, prompts, name, how) for name, how in ways.items()}
    stats = {name: counted for name, counted in warm_ups.items() if counted is not None}
    names = list(stats)
    results: dict[str, list[list[Result]]] = {name: [] for name in names}  # name -> round -> prompt
    for turn in range(rounds):
        for name in names:
            results[name].append([])
        with remembering(job.model, copy.deepcopy(known)):
            for inputs in prompts:
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    results[name][turn].append(job.run(inputs, **ways[name]))
    return [_row(name, stats[name], results) for name in names]


def _transformers_way(how: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """transformers' counterpart of a method, and its name."""
    if "assistant_model" in how:
        return {ASSISTED: {"assistant_model": how["assistant_model"]}}
    config = how["spec_config"]
    alike = config if config.transformers_arguments else PromptLookupConfig()
    return {TRANSFORMERS: {theirs: getattr(alike, ours) for theirs, ours in alike.transformers_arguments.items()}}


def _warm_up(job: Job, prompts: Sequence[Inputs], name: str, how: Mapping[str, Any]) -> SpecStats | None:
    """What one pass over the prompts drafts and accepts; `None` where transformers' loop refuses the model."""
    total = SpecStats(method=name)
    for inputs in prompts:
        try:
            with count_forwards(job.model) as forwards:
                result = job.run(inputs, **how)
        except ValueError as error:
            if name not in (TRANSFORMERS, ASSISTED):
                raise
            note(f"note: {name} is left out: {' '.join(str(error).split())}")
            return None
        if result.stats is not None:
            total.num_drafts += result.stats.num_drafts
            total.num_draft_tokens += result.stats.num_draft_tokens
            total.num_accepted_tokens += result.stats.num_accepted_tokens
        else:
            # Each forward carries the last token (the first one: the prompt) and the drafts, and emits one token
            # besides the accepted drafts.
            total.num_drafts += forwards.calls
            total.num_draft_tokens += forwards.tokens - inputs["input_ids"].shape[1] - (forwards.calls - 1)
            total.num_accepted_tokens += len(result.token_ids) - forwards.calls
    return total


def _row(name: str, stats: SpecStats, results: Mapping[str, Sequence[Sequence[Result]]]) -> Row:
    own, plain = results[name], results[PLAIN]
    num_prompts = len(own[0])
    equal = sum(
        all(mine[index].token_ids == reference[index].token_ids for mine, reference in zip(own, plain, strict=True))
        for index in range(num_prompts)
    )
    calls = [result for turn in own for result in turn]
    return Row(
        name=name,
        tokens=sum(len(result.token_ids) for result in own[0]),
        tokens_per_second=sum(len(result.token_ids) for result in calls) / sum(result.seconds for result in calls),
        ratio_to_plain=_ratio(own, plain),
        ratio_to_transformers=next(
            (_ratio(own, results[way]) for way in (TRANSFORMERS, ASSISTED) if way in results), None
        ),
        drafted=stats.num_draft_tokens,
        accepted=stats.num_accepted_tokens,
        mean_acceptance_length=stats.mean_acceptance_length,
        prompts_equal_to_plain=equal,
        equal_to_plain=equal == num_prompts,
    )


def _ratio(own: Sequence[Sequence[Result]], other: Sequence[Sequence[Result]]) -> float:
    pairs = [pair for turn in zip(own, other, strict=True) for pair in zip(*turn, strict=True)]
    return median(_speed(mine) / _speed(theirs) for mine, theirs in pairs)


def _speed(result: Result) -> float:
    """Tokens a second."""
    return len(result.token_ids) / result.seconds
